"""Runs one rank of a worker on the node where Ray puts it."""

from __future__ import annotations

import os
import signal
import threading

from quire.services.local.child_processes import start_child
from quire.services.local.parent_end import end_with_parent
from quire.services.rank_process import run_rank_process
from quire.services.worker.rank_config import RankConfig


class RankActor:
    """An actor that shares the life of a rank, its child process.

    If the actor ends, its rank leaves: the worker drains, and ends with all its ranks. Ray starts the actor
    again, but its rank joins no worker that runs; the launcher makes other actors for the next worker.
    """

    def __init__(self, name: str, config: RankConfig) -> None:
        end_with_parent(signal.SIGKILL)
        self._name = name
        self._child = start_child(name, run_rank_process, config)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def __repr__(self) -> str:
        """Return the rank's name, which Ray writes before each line of its log."""
        return self._name

    def _watch(self) -> None:
        self._child.process.join()
        os._exit(0)
