"""The queue between the engine and one request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quire.engine.sequences.sequence import SequenceStatus, SequenceUpdate

MAX_BATCH = 1024
"""Most updates of one message: with 20 logprobs each they take 0.2 MB."""


class Updates:
    """What happens to a request, in order; an exception ends it."""

    def __init__(self) -> None:
        self._waiting: deque[SequenceUpdate | Exception] = deque()
        self._has_come = asyncio.Event()
        self._take: Callable[[SequenceUpdate | Exception], None] = self._keep

    def put(self, update: SequenceUpdate | Exception) -> None:
        """Add what has happened next."""
        self._take(update)

    async def next(self) -> SequenceUpdate:
        """Return the next update.

        Raises:
            Exception: the exception that came in its place or with it.
        """
        while not self._waiting:
            self._has_come.clear()
            await self._has_come.wait()
        return checked(self._waiting.popleft())

    async def next_batch(self) -> list[SequenceUpdate]:
        """Return the updates that have come, at least one: a slow reader gets several steps in one message.

        Raises:
            Exception: see ``next``.
        """
        batch = [await self.next()]
        while self._waiting and len(batch) < MAX_BATCH:
            batch.append(await self.next())
        return batch

    async def begun(self) -> None:
        """Drop the updates of the prompt; return when the next one has tokens, is of beams, or is the end.

        Raises:
            Exception: see ``next``.
        """
        while (update := await self.next()).status < SequenceStatus.DECODING:
            pass
        self._waiting.appendleft(update)

    def pass_on(self, take: Callable[[SequenceUpdate | Exception], None]) -> None:
        """Call ``take`` with all updates that wait, and from now on with each as it comes."""
        while self._waiting:
            take(self._waiting.popleft())
        self._take = take

    def _keep(self, update: SequenceUpdate | Exception) -> None:
        self._waiting.append(update)
        self._has_come.set()


def checked(update: SequenceUpdate | Exception) -> SequenceUpdate:
    """Return an update, or raise the exception that came in its place or with it."""
    if isinstance(update, Exception):
        raise update
    if update.error is not None:
        raise update.error
    return update
