"""The findings about each command that serves, by the settings with which it would start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quire.rpc.errors import BadFileError
from quire.services.doctor.machine import Finding, check_machine
from quire.services.doctor.surroundings import check_open_files, check_ports, check_redis, check_tls
from quire.services.local.config import LocalStackConfig
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

REGISTER = "give router and workers the same --redis-url"


def check_router(config: RouterConfig) -> Iterator[Finding]:
    """Find out whether a router can serve here."""
    yield from _check_public_side(config)
    if config.redis_url is not None:
        yield check_redis(config.redis_url)
    elif config.worker_addresses:
        yield Finding("ok", "redis", f"not used: {len(config.worker_addresses)} workers by --worker")
    else:
        yield Finding("problem", "redis", "no --redis-url and no --worker: it finds no workers", REGISTER)


def check_worker(config: WorkerConfig) -> Iterator[Finding]:
    """Find out whether a worker can serve here."""
    yield from check_machine(config, num_workers=1)
    yield from check_ports(config.host, {"--port": config.port, "--metrics-port": config.metrics_port})
    if config.redis_url is not None:
        yield check_redis(config.redis_url)
    else:
        yield Finding("warning", "redis", "no --redis-url: routers find it only by their --worker", REGISTER)
    yield check_tls("cluster", config.cluster_tls)
    yield check_open_files(config.max_num_seqs)


def check_stack(config: LocalStackConfig) -> Iterator[Finding]:
    """Find out whether a router, its workers and Redis can run here together."""
    from quire.services.local.redis_process import RedisNotStartedError, find_redis_server
    from quire.services.local.stack import numbers_of_workers

    if config.ray is None:
        yield from check_machine(config.worker, sum(numbers_of_workers(config).values()))
    yield from _check_public_side(config.router)
    if config.redis_url is not None:
        yield check_redis(config.redis_url)
        return
    try:
        yield Finding("ok", "redis", f"a private one, {find_redis_server()}")
    except RedisNotStartedError as error:
        yield Finding("problem", "redis", str(error), "install redis-server, or give --redis-url")


def _check_public_side(config: RouterConfig) -> Iterator[Finding]:
    from quire.services.router.public_servers import has_http

    admin = {name: port for name, port in config.ports.items() if name.startswith("--admin-port")}
    yield from check_ports(config.host, {k: v for k, v in config.ports.items() if k not in admin})
    yield from check_ports("127.0.0.1", admin)
    if config.http_port is not None and not has_http():
        remedy = "in quire's clone, run .venv/bin/pip install -e '.[http]', or leave --http-port out"
        yield Finding("problem", "packages", "the HTTP API needs the extra http", remedy)
    yield check_tls("public", config.public_tls)
    yield check_tls("cluster", config.cluster_tls)
    if config.api_keys_file is not None:
        yield _check_keys(config.api_keys_file)
    yield check_open_files(config.max_requests)


def _check_keys(path: Path) -> Finding:
    from quire.services.router.tenants.api_keys import read_keys

    try:
        return Finding("ok", "api keys", f"{path}: {len(read_keys(path))}")
    except BadFileError as error:
        return Finding("problem", "api keys", str(error), "quire keys new makes a line")
