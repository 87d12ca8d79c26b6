"""Workers of one machine lend each other the processors of idle ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.runner.lent_processors import LentProcessors, SharedProcessors

SIZES = (1, 2, 4)
HOLDER = """
import sys, time
from pathlib import Path
from quire.engine.runner.lent_processors import LentProcessors, SharedProcessors
worker = LentProcessors(SharedProcessors(Path(sys.argv[1]), 1, (1, 2, 4)))
worker.occupy()
with worker.borrowed() as number:
    print(number, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file with the locks."""
    path = tmp_path / "processors"
    path.touch()
    return path


@pytest.fixture
def workers(path: Path) -> Iterator[list[LentProcessors]]:
    """Three workers with 1, 2 and 4 processors."""
    workers = [LentProcessors(SharedProcessors(path, index, SIZES)) for index in range(len(SIZES))]
    yield workers
    for worker in workers:
        worker.close()


def num_borrowed(worker: LentProcessors) -> int:
    """Let a worker borrow for a moment; return how many processors it has then."""
    with worker.borrowed() as number:
        return number


def test_a_worker_borrows_from_the_workers_without_work(workers: list[LentProcessors]) -> None:
    first, second, third = workers
    first.occupy()
    assert num_borrowed(first) == 7
    third.occupy()
    assert num_borrowed(first) == 3
    second.occupy()
    assert num_borrowed(first) == 1
    assert third.are_wanted()
    third.vacate()
    assert num_borrowed(first) == 5


def test_only_one_worker_borrows_the_same_processors(workers: list[LentProcessors]) -> None:
    first, second, _ = workers
    first.occupy()
    second.occupy()
    with first.borrowed() as number, second.borrowed() as others_number:
        assert (number, others_number) == (5, 2)
    assert num_borrowed(second) == 6


def test_a_worker_uses_its_processors_while_they_are_borrowed(workers: list[LentProcessors]) -> None:
    first, second, _ = workers
    first.occupy()
    with first.borrowed() as number:
        assert number == 7
        second.occupy()
        assert num_borrowed(second) == 2
    assert num_borrowed(first) == 5


def test_a_worker_that_takes_the_place_of_an_ending_one_reserves_its_processors(
    path: Path, workers: list[LentProcessors]
) -> None:
    new, other, _ = workers
    ending = LentProcessors(SharedProcessors(path, 0, SIZES))
    ending.occupy()
    new.occupy()
    with new.borrowed(), other.borrowed() as number:
        assert number == 2
    ending.close()
    with new.borrowed(), other.borrowed() as number:
        assert number == 2
    new.vacate()
    with other.borrowed() as number:
        assert number == 7


def test_a_step_that_fails_returns_what_it_borrowed(workers: list[LentProcessors]) -> None:
    first, second, _ = workers
    first.occupy()
    with pytest.raises(RuntimeError), first.borrowed():
        raise RuntimeError
    first.vacate()
    assert num_borrowed(second) == 7


def test_a_killed_worker_holds_nothing(path: Path, workers: list[LentProcessors]) -> None:
    first = workers[0]
    first.occupy()
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == 6
        assert num_borrowed(first) == 1
        os.kill(holder.pid, signal.SIGKILL)
    assert num_borrowed(first) == 7
