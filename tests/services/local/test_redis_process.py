"""The start of a private Redis: a server that ends is tried again, and the error says what it said."""

from __future__ import annotations

import os
import signal
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import redis

from quire.services.local import redis_process
from quire.services.local.redis_process import RedisNotStartedError, RedisProcess

ENDS_AT_ONCE = """#!/bin/sh
exec <&-
echo "no memory for a server" >&2
echo tried >>"{tries}"
exit 3
"""


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the server by a program that ends before it has read its settings."""
    program, tries = tmp_path / "redis-server", tmp_path / "tries.txt"
    program.write_text(ENDS_AT_ONCE.format(tries=tries))
    program.chmod(0o755)
    monkeypatch.setattr(redis_process, "find_redis_server", lambda: str(program))
    # Settings that do not fit into a pipe's buffer are still being written when the program ends.
    monkeypatch.setattr(RedisProcess, "_settings", lambda self: "save 1 1\n" * 100_000)
    return tries


def test_a_server_that_ends_at_once_is_an_error_that_names_the_reason(tries: Path) -> None:
    with pytest.raises(RedisNotStartedError, match="no memory for a server"):
        RedisProcess()
    assert len(tries.read_text().splitlines()) == redis_process.PORT_ATTEMPTS


def test_a_given_port_is_tried_once(tries: Path) -> None:
    with pytest.raises(RedisNotStartedError):
        RedisProcess(port=1)
    assert len(tries.read_text().splitlines()) == 1


def test_the_folder_of_temporary_files_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / 'a "folder" of\ttemporary files \\ \u00e9\a\udcff'
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with RedisProcess():
        assert len(list(folder.iterdir())) == 1
    assert not list(folder.iterdir())


def test_a_server_that_ends_is_started_again_at_its_url() -> None:
    with RedisProcess() as process, redis.Redis.from_url(process.worker_url) as client:
        assert not process.start_again()
        assert process.sentinel is not None
        os.kill(process.pid, signal.SIGKILL)
        assert wait([process.sentinel], 20.0)
        assert process.start_again()
        assert client.ping()
        assert not process.start_again()
    assert process.sentinel is None
