"""A worker of several processes that fails or is killed while it loads leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SECONDS = 60.0
PROGRAM = "import sys; from quire.cli.main import main; sys.argv[0] = 'quire'; main()"
COMMAND = [sys.executable, "-c", PROGRAM, "decode", "--tensor-parallel-size", "2", "--threads", "2"]


@contextmanager
def loading_worker() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a worker; yield its process and that of its other rank, which has just begun."""
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True) as worker:
        deadline = time.monotonic() + SECONDS
        while not (ranks := ranks_of(worker.pid)):
            assert worker.poll() is None, worker.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        try:
            yield worker, ranks[0]
        finally:
            worker.kill()


def ranks_of(process_id: int) -> list[int]:
    """Return the children of a process that run a rank."""
    found = []
    for path in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in path.read_text().split():
            if b"quire.engine.ranks.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def await_end(process_id: int) -> None:
    deadline = time.monotonic() + SECONDS
    while is_running(process_id):
        assert time.monotonic() < deadline, "the process has outlived its worker"
        time.sleep(0.02)


@pytest.mark.parametrize("delay", [0.0, 1.5, 3.0])
def test_the_ranks_of_a_worker_that_is_killed_while_it_loads_end(delay: float) -> None:
    with loading_worker() as (worker, rank):
        time.sleep(delay)
        worker.kill()
        worker.wait()
        await_end(rank)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_whose_rank_fails_while_it_loads_ends(sent: signal.Signals) -> None:
    with loading_worker() as (worker, rank):
        os.kill(rank, sent)
        assert worker.wait(SECONDS) == 1
        assert not is_running(rank)
        assert worker.stderr is not None
        assert "error: the worker did not start: rank 1 has " in worker.stderr.read()
