"""A worker of several processes that fails or is killed while it loads leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.testing.forked import Forked
from tests.testing.processes import QUIRE, have_ended
from tests.testing.until import until

pytestmark = pytest.mark.slow

SECONDS = 60.0
ARGUMENTS = ["decode", "--tensor-parallel-size", "2", "--threads", "2"]


def ranks_of(process_id: int) -> list[int]:
    """Return the children of a process that run a rank."""
    children = Path(f"/proc/{process_id}/task").glob("*/children")
    found = [int(child) for path in children for child in path.read_text().split()]
    return [child for child in found if b"engine.ranks.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def loading_worker() -> Iterator[tuple[Forked, int]]:
    """Fork a worker; yield its process and that of its other rank, which starts from scratch."""
    with closing(Forked(QUIRE[-1], ARGUMENTS, has_pipes=True)) as worker:
        deadline = time.monotonic() + SECONDS
        while not (ranks := ranks_of(worker.pid)):
            assert worker.poll() is None, worker.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield worker, ranks[0]


async def test_the_ranks_of_a_worker_that_is_killed_while_it_loads_end() -> None:
    with loading_worker() as (worker, rank):
        worker.kill()
        await until(lambda: have_ended([rank]))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_whose_rank_fails_while_it_loads_ends(sent: signal.Signals) -> None:
    with loading_worker() as (worker, rank):
        os.kill(rank, sent)
        assert worker.wait(SECONDS) == 1
        assert have_ended([rank])
        assert "error: the worker did not start: rank 1 has " in worker.stderr.read()
