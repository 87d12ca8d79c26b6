"""Defines the interface through which a stack starts its workers, as local processes or in a Ray cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from quire.services.worker.config import WorkerConfig

RESTART_SECONDS = 1.0
"""Time between the end of a process and its next start."""

T = TypeVar("T")
Waitable = Connection | int
"""An object that ``multiprocessing.connection.wait`` can wait for."""


class LaunchError(RuntimeError):
    """Workers could not be started; the message names the remedy."""


class Started(NamedTuple):
    """A process serves, perhaps after a restart. A worker's ``report`` is a ``RunningWorker``."""

    name: str
    report: Any


class NotStarted(NamedTuple):
    """A process ended before it served, or could not be placed. It is started again unless it was stopped."""

    name: str
    error: Exception


class Stopped(NamedTuple):
    """A process has ended after a request to stop it."""

    name: str


Event = Started | NotStarted | Stopped


class Launcher(Protocol):
    """Starts workers, starts again those that end, and stops them.

    It logs ``process_ended`` and ``process_started_again``. Only one thread may use it.
    """

    @property
    def host(self) -> str:
        """Address of this machine at which its workers reach Redis."""

    @property
    def names(self) -> set[str]:
        """The workers that were started and have not ended after a stop."""

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Begin to start workers, given by name. Each causes an event later."""

    def stop(self, name: str) -> None:
        """Ask a worker to finish its requests within its grace period and end; this causes an event later."""

    def waitables(self) -> list[Waitable]:
        """Return the objects that become ready when there are events."""

    @property
    def seconds(self) -> float | None:
        """Seconds after which ``events`` has work even if nothing becomes ready; None: it has none."""

    def events(self) -> list[Event]:
        """Without waiting, do the work that is due, and return the events since the last call."""


class Mailbox(Generic[T]):
    """Passes objects from other threads to the thread that waits for ``waitable``."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        self.waitable, self._signal = multiprocessing.Pipe(duplex=False)

    def put(self, item: T) -> None:
        """Add an object."""
        self._queue.put(item)
        self._signal.send_bytes(b".")

    def take(self) -> list[T]:
        """Return all objects, without waiting."""
        items = []
        while self.waitable.poll():
            self.waitable.recv_bytes()
            items.append(self._queue.get())
        return items
