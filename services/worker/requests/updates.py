"""The queue between the engine and one request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quire.engine.sequences.sequence import SequenceStatus, SequenceUpdate

MAX_BATCH = 1024
"""Most updates in one message, 0.2 MB if each has 20 logprobs."""


class Updates:
    """The updates of a request in order; an exception is the last one."""

    def __init__(self) -> None:
        self._waiting: deque[SequenceUpdate | Exception] = deque()
        self._has_update = asyncio.Event()
        self._receive: Callable[[SequenceUpdate | Exception], None] = self._queue

    def put(self, update: SequenceUpdate | Exception) -> None:
        """Add an update or an exception."""
        self._receive(update)

    async def next(self) -> SequenceUpdate:
        """Return the next update.

        Raises:
            Exception: the queued exception, or the update's error.
        """
        while not self._waiting:
            self._has_update.clear()
            await self._has_update.wait()
        return checked(self._waiting.popleft())

    async def next_batch(self) -> list[SequenceUpdate]:
        """Wait for at least one update; return all waiting ones, so a slow reader gets several steps at once.

        Raises:
            Exception: see ``next``.
        """
        batch = [await self.next()]
        while self._waiting and len(batch) < MAX_BATCH:
            batch.append(await self.next())
        return batch

    async def begun(self) -> None:
        """Drop the updates of the prompt, until the next one has tokens, belongs to beams, or is the end.

        Raises:
            Exception: see ``next``.
        """
        while (update := await self.next()).status < SequenceStatus.DECODING:
            pass
        self._waiting.appendleft(update)

    def forward_to(self, receive: Callable[[SequenceUpdate | Exception], None]) -> None:
        """Call a function with the waiting updates, and immediately with each later one."""
        while self._waiting:
            receive(self._waiting.popleft())
        self._receive = receive

    def _queue(self, update: SequenceUpdate | Exception) -> None:
        self._waiting.append(update)
        self._has_update.set()


def checked(update: SequenceUpdate | Exception) -> SequenceUpdate:
    """Return an update; raise a queued exception, or the update's error."""
    if isinstance(update, Exception):
        raise update
    if update.error is not None:
        raise update.error
    return update
