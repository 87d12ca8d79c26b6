"""Starts processes that end with this one, stops them in order, and starts them again.

A process is started from scratch, or forked from multiprocessing's fork server, which has already imported
the large libraries that several processes need. Modules of the fork server must not start threads or import
gRPC, since neither survives a fork. OpenBLAS may have threads, because it ends them before a fork.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Generic, NamedTuple, TypeVar

from quire.rpc.errors import ServiceError
from quire.rpc.server import STOP_SIGNALS, Draining
from quire.services.launch.launcher import (
    RESTART_SECONDS,
    Event,
    NotStarted,
    Started,
    Stopped,
    Waitable,
)
from quire.services.server.log import EventLogger
from quire.settings.setting import SettingError

KILL_SECONDS = 10.0
"""Time after its grace period in which a process has to end before it is killed."""

_NO_STATUS = 255
"""What multiprocessing takes for the exit code of a process whose fork server has ended."""

T = TypeVar("T")
Target = Callable[..., None]
Context = ForkServerContext | SpawnContext
FROM_SCRATCH = multiprocessing.get_context("spawn")
_log = EventLogger("stack")


class Child(NamedTuple):
    """A started process and the pipe on which it reports that it is ready."""

    name: str
    process: BaseProcess
    pipe: Connection


def fork_server(modules: Sequence[str]) -> Context:
    """Start the fork server, which imports ``modules``, and return the context of processes forked from it.

    Where libraries may not survive a fork, processes start from scratch instead: on systems other than Linux,
    and if there is a GPU driver, which torch calls.

    Raises:
        OSError: the server cannot be started, or its socket in the folder for temporary files.
    """
    if sys.platform != "linux" or has_gpu_driver():
        return FROM_SCRATCH
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    # The server keeps these signals blocked, so that a signal to the whole process group does not end it.
    try:
        with signals_held_back():
            forkserver.ensure_running()
    except OSError as error:
        if "too long" not in str(error):
            raise
        raise OSError(f"{error}: set TMPDIR to a folder with a shorter path") from error
    return context


def wait_for_imports(context: Context) -> None:
    """Wait until the fork server has imported its modules. A signal may interrupt this, but not a start.

    Raises:
        OSError: the fork server has ended.
    """
    if context is not FROM_SCRATCH:
        process = context.Process()
        has_started = threading.Event()
        failures: list[OSError] = []

        def start() -> None:
            try:
                _start(process)
            except OSError as error:
                failures.append(error)
            finally:
                has_started.set()

        # A signal must not interrupt the start, or the new process would find half of its arguments. Nothing
        # joins the thread: if a signal interrupts a join, Python before 3.13 regards the thread as ended.
        threading.Thread(target=start, daemon=True).start()
        has_started.wait()
        if failures:
            raise failures[0]
        process.join()


def _start(process: BaseProcess) -> None:
    """Start a process.

    Raises:
        OSError: it cannot be started, or its fork server has ended.
    """
    try:
        process.start()
    except (EOFError, ConnectionError) as error:
        raise ChildProcessError(
            "the process that imports the workers' libraries and forks them was killed; memory may be short"
        ) from error


def has_gpu_driver() -> bool:
    """Return whether this system has the driver of a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@contextmanager
def stopped_at_end(stop_seconds: float, show: Callable[[Draining], None]) -> Iterator[dict[str, Child]]:
    """Yield an empty dictionary; on exit, stop the processes in it.

    Args:
        stop_seconds: time for the processes to stop before they are killed.
        show: called with the reports of a stopping process about the requests that it waits for.
    """
    running: dict[str, Child] = {}
    try:
        yield running
    finally:
        for child in running.values():
            child.process.terminate()
        deadline = time.monotonic() + stop_seconds
        try:
            for child in running.values():
                _await_end(child, deadline, show)
        finally:
            for child in running.values():
                child.process.kill()
                child.process.join()
                child.pipe.close()


def _await_end(child: Child, deadline: float, show: Callable[[Draining], None]) -> None:
    """Wait until a process has ended or the deadline has passed; show its reports meanwhile."""
    ends: list[Connection | int] = [child.pipe, child.process.sentinel]
    while child.process.sentinel not in (ready := wait(ends, max(0.0, deadline - time.monotonic()))):
        if not ready:
            _log.warning("process_killed", name=child.name)
            return
        try:
            report = child.pipe.recv()
        except (EOFError, OSError):
            ends.remove(child.pipe)
            continue
        if isinstance(report, Draining):
            show(report)


def start_child(name: str, target: Target, argument: object, context: Context = FROM_SCRATCH) -> Child:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child_main, args=(target, argument, sender), name=name)
    try:
        _start(process)
    except BaseException:
        receiver.close()
        raise
    finally:
        sender.close()
    return Child(name, process, receiver)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block the stop signals while a process starts; threads that start meanwhile block them permanently.

    A signal then arrives only after the process has started and been recorded, and Ctrl-C only after the
    process has its own group.
    """
    # Start the resource tracker first, because its start would unblock the signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child_main(target: Callable[..., None], argument: object, pipe: Connection) -> None:
    # Imported objects of the fork server are never freed, so the garbage collector need not visit them.
    gc.freeze()
    # Ctrl-C reaches all processes in the terminal's group, but the stack has to end its processes in order.
    os.setsid()
    # Ignore a SIGINT that was blocked during the start; the stack sends its own SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _end_with_parent()
    try:
        target(argument, partial(_report, pipe))
    except Exception as error:
        is_explained = isinstance(error, ServiceError | OSError | SettingError)
        _report(pipe, error if is_explained else RuntimeError(f"{type(error).__name__}: {error}"))
        if not isinstance(error, ServiceError | OSError | ValueError | RuntimeError):
            raise
        sys.exit(1)


def _end_with_parent() -> None:
    """Send SIGTERM to this process when the process that requested it has ended, for any reason.

    Linux's parent death signal does not help: the parent is the fork server, which ends after its processes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _report(pipe: Connection, report: object) -> None:
    # If the parent has ended, the report is lost, and SIGTERM ends this process.
    with suppress(OSError):
        pipe.send(report)


def end_of(process: BaseProcess) -> str:
    """Return a description of how a process ended."""
    # The sentinel, a pipe, closes shortly before the process's exit status is available.
    process.join()
    code = process.exitcode
    assert code is not None
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _end_orphan(process: BaseProcess) -> None:
    """Kill a process that seems to have ended, but only its fork server has, which reports its end."""
    process.join()
    if process.exitcode == _NO_STATUS and process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


class ChildProcesses(Generic[T]):
    """Processes of one kind. If one ends without a stop, it is started again after ``RESTART_SECONDS``.

    Args:
        running: the dictionary from ``stopped_at_end``, to which the processes are added.
    """

    def __init__(self, running: dict[str, Child], target: Target, context: Context = FROM_SCRATCH) -> None:
        self.running = running
        self._target = target
        self._context = context
        self._arguments: dict[str, T] = {}
        self._starting: set[str] = set()
        self._has_served: set[str] = set()
        self._stopping: set[str] = set()
        self._due: dict[str, float] = {}

    @property
    def names(self) -> set[str]:
        """The processes that were started and have not ended after a stop."""
        return set(self._arguments)

    def start(self, arguments: Mapping[str, T]) -> None:
        """Run ``target(argument, report)`` in a process for each name."""
        for name, argument in arguments.items():
            self._arguments[name] = argument
            self._start(name)

    def start_again_with(self, name: str, argument: T) -> None:
        """Use another argument when the process is started again."""
        self._arguments[name] = argument

    def stop(self, name: str) -> None:
        """Ask a process to end, and do not start it again."""
        self._stopping.add(name)
        self._due.pop(name, None)
        self.running[name].process.terminate()

    def waitables(self) -> list[Waitable]:
        """Return the objects that become ready when there are events."""
        alive = [child for name, child in self.running.items() if name not in self._due]
        return [
            *(child.process.sentinel for child in alive),
            *(child.pipe for child in alive if child.name in self._starting),
        ]

    @property
    def seconds(self) -> float | None:
        """Time until the next start; None: none is due."""
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def events(self) -> list[Event]:
        """Restart the processes that are due, and return the events since the last call."""
        for name in [name for name, at in self._due.items() if at <= time.monotonic()]:
            del self._due[name]
            self.running[name].pipe.close()
            self._start(name)
            _log.info("process_started_again", name=name)
        ready = wait(self.waitables(), 0)
        happened: list[Event] = []
        for name, child in list(self.running.items()):
            if name in self._starting and child.pipe in ready:
                happened.append(self._report(child))
            if child.process.sentinel in ready:
                _end_orphan(child.process)
                if name in self._starting:
                    happened.append(self._report(child))
                happened += self._end(child)
        return happened

    def _start(self, name: str) -> None:
        self._starting.add(name)
        with signals_held_back():
            self.running[name] = start_child(name, self._target, self._arguments[name], self._context)

    def _report(self, child: Child) -> Event:
        self._starting.discard(child.name)
        try:
            report = child.pipe.recv()
        except (EOFError, OSError):
            report = RuntimeError(f"it {end_of(child.process)} without saying why; its log above may")
        if isinstance(report, Exception):
            if child.name in self._has_served:  # otherwise the caller reports it
                _log.error("process_not_started", name=child.name, error=str(report))
            return NotStarted(child.name, report)
        self._has_served.add(child.name)
        return Started(child.name, report)

    def _end(self, child: Child) -> list[Event]:
        name = child.name
        if name in self._due:
            return []
        if name not in self._stopping:
            if name in self._has_served:  # otherwise the caller reports why it did not start
                _log.error("process_ended", name=name, end=end_of(child.process))
            self._due[name] = time.monotonic() + RESTART_SECONDS
            return []
        child.process.join()
        child.pipe.close()
        del self.running[name], self._arguments[name]
        self._stopping.discard(name)
        self._starting.discard(name)
        self._has_served.discard(name)
        return [Stopped(name)]


def stop_on_signals() -> list[int]:
    """Make the first SIGINT or SIGTERM raise KeyboardInterrupt, and the next one kill all child processes.

    SIGINT is handled even if it was ignored before, as in the background of a script. Returns a list to which
    the numbers of received signals are added.
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt
        for process in multiprocessing.active_children():
            process.kill()

    for each in STOP_SIGNALS:
        signal.signal(each, handle)
    return received
