"""Runs one worker on the node where Ray puts it."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

from quire.services.launch.launcher import RESTART_SECONDS
from quire.services.local.child_processes import KILL_SECONDS, end_of, start_child
from quire.services.ray_cluster.connection import node_address
from quire.services.server.process import end_with_parent
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.services.worker_process import run_worker


class WorkerActor:
    """An actor that shares the life of a worker, its child process.

    The worker is the same process as on one machine, and its requests and blocks do not pass through Ray. If
    the worker ends, the actor ends too, and Ray starts both again, on another node if this one is gone. The
    new worker has a new epoch.
    """

    def __init__(self, config: WorkerConfig) -> None:
        # Where Ray's daemon of a node ends, Ray's own check comes up to 1 s late, and kills the worker. This
        # signal ends only the actor; the worker notices and drains, so that its answers move away.
        end_with_parent(signal.SIGKILL)
        config = replace(config, host=node_address())
        assert config.worker_id is not None
        self._name = config.worker_id
        self._grace_seconds = config.grace_seconds
        self._is_stopping = False
        self._started: Future[RunningWorker | str] = Future()
        self._child = start_child(self._name, run_worker, config)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def __repr__(self) -> str:
        """Return the worker's name, which Ray writes before each line of its log."""
        return self._name

    def started(self) -> RunningWorker | str:
        """Wait until the worker serves and return its report, or why it could not start."""
        return self._started.result()

    def ended(self) -> None:
        """Return when the worker has ended after ``stop``; the call fails if it ends in any other way."""
        self._child.process.join()
        while not self._is_stopping:
            time.sleep(RESTART_SECONDS)

    def stop(self) -> None:
        """Let the worker finish its requests within its grace period, and return when it has ended."""
        self._is_stopping = True
        self._child.process.terminate()
        self._child.process.join(self._grace_seconds + KILL_SECONDS)
        self._child.process.kill()
        self._child.process.join()

    def _watch(self) -> None:
        try:
            report = self._child.pipe.recv()
        except (EOFError, OSError):
            report = RuntimeError(f"it {end_of(self._child.process)}; its log above says why")
        self._started.set_result(str(report) if isinstance(report, Exception) else report)
        self._child.process.join()
        # Give ``started`` time to return the reason, and delay the next start of a worker that cannot start.
        time.sleep(RESTART_SECONDS)
        if not self._is_stopping:
            os._exit(1)
