"""What rank 0 sees of the other ranks' processes: their end, their stop, and that they are late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from quire.engine.model.collectives import SharedMemory, SharedSizes
from quire.engine.ranks.rank_failure import STOPPED_SECONDS, RankWatch, is_stopped
from quire.kernels.cpu.exchange import LINE

Process = subprocess.Popen[bytes]
STEP = LINE // 8


@pytest.fixture
def process() -> Iterator[Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(SharedSizes(2, 1, 64, 64, 64))


def stop(process: Process) -> None:
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not is_stopped(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_end_of_a_rank_is_seen_at_once(process: Process, memory: SharedMemory) -> None:
    watch = RankWatch([process], memory)
    assert watch.observe(1.0, 10.0) is None
    process.kill()
    process.wait()
    assert watch.observe(0.0, 10.0) == "rank 1 has ended with code -9"


def test_a_rank_that_is_stopped_for_a_moment_does_not_fail(process: Process, memory: SharedMemory) -> None:
    watch = RankWatch([process], memory)
    stop(process)
    assert watch.observe(STOPPED_SECONDS, 10.0) is None
    process.send_signal(signal.SIGCONT)
    while is_stopped(process.pid):
        time.sleep(0.01)
    assert watch.observe(STOPPED_SECONDS, 10.0) is None
    stop(process)
    assert watch.observe(STOPPED_SECONDS, 10.0) is None
    assert watch.observe(0.05, 10.0) == "rank 1 has been stopped"


def test_only_a_rank_that_rank_0_waits_for_is_late(process: Process, memory: SharedMemory) -> None:
    watch = RankWatch([process], memory)
    assert watch.observe(100.0, 10.0) is None, "no step runs"
    memory.counters[0] = 1
    assert watch.observe(6.0, 10.0) is None
    memory.counters[0], memory.counters[STEP] = 2, 1
    assert watch.observe(6.0, 10.0) is None, "it has come to another round"
    assert watch.observe(6.0, 10.0) is None
    assert watch.observe(6.0, 10.0) == "rank 1 has not answered for 10 s"
    memory.counters[STEP] = 3
    assert RankWatch([process], memory).observe(100.0, 10.0) is None, "rank 0 is the late one"


def test_a_process_that_has_ended_is_not_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not is_stopped(process.pid)
    assert not is_stopped(os.getpid())
