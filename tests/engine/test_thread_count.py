"""A step has fewer threads while other programs keep processors busy, and all of them afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.engine.runner.thread_count import INTERVAL_SECONDS, ProcessorTimes, ThreadCount


class FakeMachine(ProcessorTimes):
    """A clock, and counters that a test moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.waited = 0.0
        self.idle = 0.0

    def seconds_waited(self) -> float:
        return self.waited

    def seconds_idle(self, processors: object) -> float:
        return self.idle


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def count(machine: FakeMachine) -> Iterator[ThreadCount]:
    """A count of up to four threads."""
    own = torch.get_num_threads()
    torch.set_num_threads(4)
    yield ThreadCount(machine, lambda: machine.now)
    torch.set_num_threads(own)


def compute(
    machine: FakeMachine, count: ThreadCount, lost: float = 0, idle: float = 0, step: float = 1 / 64
) -> int:
    """Run steps for an interval; return the threads of the next step.

    Args:
        lost, idle: processors' worth of time that other programs take, and that nobody uses.
        step: seconds of a step.
    """
    for _ in range(int(INTERVAL_SECONDS / step) + 1):
        with count.of_step():
            machine.now += step
            machine.waited += step * lost
            machine.idle += step * idle
    with count.of_step():
        return torch.get_num_threads()


def test_a_busy_processor_is_left_out_until_it_is_idle(machine: FakeMachine, count: ThreadCount) -> None:
    assert compute(machine, count) == 4
    assert compute(machine, count, lost=0.7) == 4
    assert compute(machine, count, lost=1.1) == 3
    assert compute(machine, count, idle=0.3) == 3
    assert compute(machine, count, lost=1.9) == 1
    assert compute(machine, count, lost=9) == 1
    assert compute(machine, count, idle=2) == 3
    assert compute(machine, count, idle=1) == 4
    assert torch.get_num_threads() == 4


def test_long_steps_use_part_of_a_processor_too(machine: FakeMachine, count: ThreadCount) -> None:
    assert compute(machine, count, lost=1, step=0.3) == 4
    assert compute(machine, count, lost=1) == 3
    assert compute(machine, count, lost=1, step=0.3) == 4


def test_waits_of_other_threads_between_steps_do_not_count(machine: FakeMachine, count: ThreadCount) -> None:
    machine.now, machine.waited = 3600.0, 20.0
    assert compute(machine, count) == 4
    machine.now, machine.waited = 7200.0, 40.0
    assert compute(machine, count) == 4
    assert compute(machine, count, lost=1) == 3


def test_the_number_of_threads_is_restored_after_a_step_that_fails(
    machine: FakeMachine, count: ThreadCount
) -> None:
    assert compute(machine, count, lost=1) == 3
    with pytest.raises(ValueError, match="step"), count.of_step():
        raise ValueError("step")
    assert torch.get_num_threads() == 4


def test_linux_counts(tmp_path: Path) -> None:
    for thread, waited in ((7, 2_000_000_000), (8, 500_000_000)):
        folder = tmp_path / "self" / "task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(f"123 {waited} 45\n")
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(
        f"cpu 9 9 9 {60 * tick}\ncpu0 1 2 3 {10 * tick} 4\n"
        f"cpu1 1 2 3 {20 * tick}\ncpu10 0 0 0 {30 * tick}\nintr 5\n"
    )
    times = ProcessorTimes(tmp_path)
    assert times.seconds_waited() == 2.5
    assert times.seconds_idle({0, 10}) == 40
    assert times.seconds_idle({1}) == 20


def test_all_processors_count_in_a_container_that_numbers_them_otherwise(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu 0 0 0 {30 * tick}\ncpu0 0 0 0 {10 * tick}\ncpu1 0 0 0 {20 * tick}\n")
    assert ProcessorTimes(tmp_path).seconds_idle({8, 9}) == 30
    assert ProcessorTimes(tmp_path).seconds_idle({1, 2}) == 30


def test_a_system_that_does_not_count(tmp_path: Path) -> None:
    assert ProcessorTimes(tmp_path).seconds_waited() == 0
    assert ProcessorTimes(tmp_path).seconds_idle({0}) == 0


def test_this_machine_counts() -> None:
    times = ProcessorTimes()
    assert times.seconds_idle(os.sched_getaffinity(0)) > 0
    assert times.seconds_waited() >= 0
