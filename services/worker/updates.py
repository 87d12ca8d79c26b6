"""The queue between the engine and one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.engine.sequences.sequence import SequenceUpdate

MAX_BATCH = 1024
"""Most updates of one message: with 20 logprobs each they take 0.2 MB."""


class Updates:
    """What happens to a request, in order; an exception ends it."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[SequenceUpdate | Exception] = asyncio.Queue()
        self._take: Callable[[SequenceUpdate | Exception], None] = self._waiting.put_nowait

    def put(self, update: SequenceUpdate | Exception) -> None:
        """Add what has happened next."""
        self._take(update)

    async def next(self) -> SequenceUpdate:
        """Return the next update.

        Raises:
            Exception: the exception that came in its place or with it.
        """
        return checked(await self._waiting.get())

    async def next_batch(self) -> list[SequenceUpdate]:
        """Return the updates that have come, at least one: a slow reader gets several steps in one message.

        Raises:
            Exception: see ``next``.
        """
        batch = [await self.next()]
        while not self._waiting.empty() and len(batch) < MAX_BATCH:
            batch.append(await self.next())
        return batch

    def pass_on(self, take: Callable[[SequenceUpdate | Exception], None]) -> None:
        """Call ``take`` with all updates that wait, and from now on with each as it comes."""
        while not self._waiting.empty():
            take(self._waiting.get_nowait())
        self._take = take


def checked(update: SequenceUpdate | Exception) -> SequenceUpdate:
    """Return an update, or raise the exception that came in its place or with it."""
    if isinstance(update, Exception):
        raise update
    if update.error is not None:
        raise update.error
    return update
