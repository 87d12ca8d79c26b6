"""Passes objects from several threads to one that waits for them with ``multiprocessing.connection.wait``."""

from __future__ import annotations

import multiprocessing
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue whose ``waitable`` is ready while it holds something."""

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
