"""Child processes that cannot be started, or whose start a signal interrupts."""

from __future__ import annotations

import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from quire.services.launch.launcher import Event, NotStarted, Started
from quire.services.local import child_processes
from quire.services.local.child_processes import (
    FROM_SCRATCH,
    ChildProcesses,
    fork_server,
    start_child,
    stopped_at_end,
    wait_for_imports,
)
from tests.testing.commands import run_command


def test_a_process_that_cannot_be_started_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=OSError(errno.EAGAIN, "Resource temporarily unavailable"))
    resource_tracker.ensure_running()
    monkeypatch.setattr(FROM_SCRATCH.Process, "start", failing)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="temporarily unavailable") as failed:
        start_child("worker", print, None)
    # The error's traceback holds the pipe: it must be closed, not only forgotten.
    assert os.listdir("/proc/self/fd") == descriptors
    assert failed.value.errno == errno.EAGAIN


INTERRUPTED_WAIT = """
import os, signal, threading
from multiprocessing import forkserver
from quire.services.local.child_processes import fork_server, wait_for_imports

def connect_and_interrupt(fds, connect=forkserver.connect_to_new_process):
    connection = connect(fds)
    os.kill(os.getpid(), signal.SIGINT)
    return connection

forkserver.connect_to_new_process = connect_and_interrupt
try:
    wait_for_imports(fork_server([]))
except KeyboardInterrupt:
    print("interrupted")
# The stack waits for its other processes; meanwhile this one is started.
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")
def test_a_signal_while_the_fork_server_imports_leaves_no_process_half_started() -> None:
    done = run_command(sys.executable, "-c", INTERRUPTED_WAIT)
    # The processes of the fork server have this standard error too, so all of them have ended.
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")
def test_a_folder_whose_path_is_too_long_for_a_socket_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 108)
    folder.mkdir()
    program = "from quire.services.local.child_processes import fork_server; fork_server([])"
    run = run_command(sys.executable, "-c", program, status=1, variables={"TMPDIR": str(folder)})
    remedy = "OSError: AF_UNIX path too long: set TMPDIR to a folder with a shorter path"
    assert run.stderr.splitlines()[-1] == remedy


PAUSE = """
import signal

def pause(serves, report):
    if serves:
        report("ready")
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")
@pytest.mark.parametrize("serves", [False, True])
def test_no_process_outlives_the_fork_server_that_reports_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    (tmp_path / "pausing.py").write_text(PAUSE)
    monkeypatch.syspath_prepend(tmp_path)
    pause, server = importlib.import_module("pausing").pause, cast("Any", forkserver)
    with stopped_at_end(5.0, lambda waiting: None) as running:
        children: ChildProcesses[bool] = ChildProcesses(running, pause, fork_server([]))
        children.start({"worker": serves})
        if serves:
            wait(children.waitables(), 60)
            assert children.events() == [Started("worker", "ready")]
        end = os.pidfd_open(running["worker"].process.pid or 0)
        os.kill(server._forkserver._forkserver_pid, signal.SIGKILL)
        wait(children.waitables(), 60)
        happened = children.events()
        assert [type(event) for event in happened] == ([] if serves else [NotStarted])
        assert children.seconds is not None  # it will be started again
        assert select.select([end], [], [], 60)[0]
        os.close(end)


SERVE_IF_GIVEN = """
import signal

def serve(needed, report):
    needed.read_text("utf-8")
    report("ready")
    signal.pause()
"""


def test_the_log_says_why_a_process_that_has_served_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "serving.py").write_text(SERVE_IF_GIVEN)
    monkeypatch.syspath_prepend(tmp_path)
    serve = importlib.import_module("serving").serve
    monkeypatch.setattr(child_processes, "RESTART_SECONDS", 0.0)
    needed = tmp_path / "needed"
    needed.touch()
    with stopped_at_end(5.0, lambda waiting: None) as running:
        children: ChildProcesses[Path] = ChildProcesses(running, serve)
        children.start({"worker": needed})
        wait(children.waitables(), 60)
        assert children.events() == [Started("worker", "ready")]
        needed.unlink()
        running["worker"].process.kill()
        happened: list[Event] = []
        while not happened:
            wait(children.waitables(), children.seconds)
            happened = children.events()
    assert [type(event) for event in happened] == [NotStarted]
    (failed,) = (vars(each)["fields"] for each in caplog.records if each.message == "process_not_started")
    assert failed["name"] == "worker"
    assert "No such file" in failed["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork server")
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_fork_server_that_is_killed_while_it_imports_is_explained(
    monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    server, connect = cast("Any", forkserver), forkserver.connect_to_new_process

    def connect_and_kill(descriptors: Sequence[int]) -> tuple[int, int]:
        os.kill(server._forkserver._forkserver_pid, signal.SIGSTOP)
        connection = connect(descriptors)
        os.kill(server._forkserver._forkserver_pid, signal.SIGKILL)
        if has_ended:
            os.waitid(os.P_PID, server._forkserver._forkserver_pid, os.WEXITED | os.WNOWAIT)
        return connection

    context = fork_server([])
    monkeypatch.setattr(forkserver, "connect_to_new_process", connect_and_kill)
    with pytest.raises(OSError, match="forks them was killed; memory may be short"):
        wait_for_imports(context)
