"""Stopping, continuing and killing real processes, and one in a session of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from quire.benchmarks.peers.process_tree import ProcessTree

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
for line in sys.stdin:
    print("answer", flush=True)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process that answers each line of its stdin; its first line on stdout is the pid of its child."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(pids: list[int], statuses: set[str]) -> None:
    """Wait until the kernel has carried out a signal."""
    deadline = time.monotonic() + 10
    while not {psutil.Process(pid).status() for pid in pids} <= statuses:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_run_only_within_the_block(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    assert parent.stdin is not None
    pids = [parent.pid, int(parent.stdout.readline())]
    tree = ProcessTree(parent.pid)
    tree.stop()
    wait_until(pids, {psutil.STATUS_STOPPED})
    with pytest.raises(KeyboardInterrupt), tree.running():
        wait_until(pids, {psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING})
        parent.stdin.write("question\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "answer\n"
        raise KeyboardInterrupt
    wait_until(pids, {psutil.STATUS_STOPPED})
    tree.kill()
    psutil.wait_procs([psutil.Process(pids[1])] if psutil.pid_exists(pids[1]) else [], timeout=10)
    assert parent.wait(10) == -9
    assert not psutil.pid_exists(pids[1]) or psutil.Process(pids[1]).status() == psutil.STATUS_ZOMBIE


def test_a_child_is_killed_whose_parent_has_ended(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    tree = ProcessTree(parent.pid)
    tree.stop()
    parent.kill()
    parent.wait(10)
    tree.kill()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_signals_to_ended_processes_do_nothing(parent: subprocess.Popen[str]) -> None:
    tree = ProcessTree(parent.pid)
    tree.kill()
    parent.wait(10)
    with tree.running():
        pass
    tree.kill()
