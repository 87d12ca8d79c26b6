"""The queue between the engine and one request."""

from __future__ import annotations

import asyncio

from quire.engine.sequence import SequenceUpdate

MAX_BATCH = 1024
"""Most updates of one message: with 20 logprobs each they take 0.2 MB."""

Updates = asyncio.Queue[SequenceUpdate | Exception]
"""What happens to a request, in order; an exception ends it."""


async def next_update(updates: Updates) -> SequenceUpdate:
    """Return the next update, or raise the exception that came in its place or with it."""
    update = await updates.get()
    if isinstance(update, Exception):
        raise update
    if update.error is not None:
        raise update.error
    return update


async def next_updates(updates: Updates) -> list[SequenceUpdate]:
    """Return the updates that have come, at least one: a slow reader gets several steps in one message."""
    batch = [await next_update(updates)]
    while not updates.empty() and len(batch) < MAX_BATCH:
        batch.append(await next_update(updates))
    return batch
