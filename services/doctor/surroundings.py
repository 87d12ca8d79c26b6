"""Checks what every process needs of its surroundings: ports, Redis, certificates, open files."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from quire.kvindex.index import UNREACHABLE
from quire.kvindex.redis_index import OLDEST_REDIS, redis_version
from quire.rpc.errors import BadFileError
from quire.rpc.server import bind_problem
from quire.services.doctor.machine import Finding

if TYPE_CHECKING:
    from quire.rpc.tls import TlsFiles

REDIS_SECONDS = 2.0
FILES_PER_REQUEST = 2
"""Most descriptors of a request: its client's connection, and one to a worker."""
SPARE_FILES = 512


def check_ports(host: str, ports: Mapping[str, int]) -> Iterator[Finding]:
    """Find out whether the ports with these names are free; 0 is a free one."""
    chosen = {name: port for name, port in ports.items() if port}
    free = []
    for name, port in chosen.items():
        if (error := bind_problem(host, port)) is None:
            free.append(str(port))
        else:
            text = f"{name} {host}:{port}: {error.strerror or error}"
            remedy = f"end the process that listens there, or give another {name.partition(' ')[0]}"
            yield Finding("problem", "port", text, remedy)
    if free:
        yield Finding("ok", "port", f"free on {host}: {', '.join(free)}")


def check_redis(url: str) -> Finding:
    """Find out whether Redis answers, and whether it is new enough."""
    where = url.rpartition("@")[2].partition("?")[0]
    try:
        version = redis_version(url, REDIS_SECONDS)
    except (*UNREACHABLE, ValueError) as error:
        # The text of the error may repeat the URL, which contains a password.
        text = f"{where} gives no answer: {type(error).__name__}"
        return Finding("problem", "redis", text, "start Redis there, or correct address, user or password")
    number = tuple(int(part) for part in version.split(".")[:2])
    if number < OLDEST_REDIS:
        oldest = ".".join(map(str, OLDEST_REDIS))
        return Finding("problem", "redis", f"{where} is Redis {version}", f"update it to {oldest} or newer")
    return Finding("ok", "redis", f"{where} is Redis {version}")


def check_tls(what: str, files: TlsFiles | None) -> Finding:
    """Find out whether the certificate files of some connections can be served."""
    if files is None:
        return Finding("ok", "tls", f"{what}: connections are plain")
    from quire.rpc.tls import server_credentials

    try:
        server_credentials(files)
    except BadFileError as error:
        return Finding("problem", "tls", f"{what}: {error}", "correct or renew the file")
    return Finding("ok", "tls", f"{what}: {files.certificate} is valid and has its key")


def check_open_files(num_requests: int) -> Finding:
    """Find out whether the process may open enough files; a process raises its soft limit to the hard one."""
    hard, needed = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        FILES_PER_REQUEST * num_requests + SPARE_FILES,
    )
    if hard != resource.RLIM_INFINITY and hard < needed:
        text = f"at most {hard}, and {num_requests} requests may need {needed}"
        return Finding("warning", "open files", text, f"raise the hard limit (ulimit -Hn {needed})")
    return Finding("ok", "open files", "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}")
