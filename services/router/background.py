"""Tasks of the router that run beside its calls, and how they are ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from quire.services.router.worker_calls import Spawn
from quire.services.server.log import get_logger

CANCEL_SECONDS = 0.1
"""Time that a cancelled task may take to end before it is cancelled again."""

_log = get_logger("router")


@asynccontextmanager
async def background() -> AsyncIterator[Spawn]:
    """Yield a function that runs short coroutines which may outlive their caller; await them at the end.

    Failures are logged here, because no caller sees them.
    """
    tasks: set[asyncio.Task[None]] = set()

    def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(ended)
        return task

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background_failed", error=repr(error))

    yield spawn
    await asyncio.gather(*tasks, return_exceptions=True)


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task again and again until it ends: redis-py may take a cancellation for a lost connection."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)
