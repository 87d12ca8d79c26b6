"""Tasks in the background: how they are started, how they end, and that a failure is logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from quire.services.server.log import EventLogger

CANCEL_SECONDS = 0.1
"""Time that a cancelled task may take to end before it is cancelled again."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]

_log = EventLogger("server")


@asynccontextmanager
async def background() -> AsyncIterator[Spawn]:
    """Yield a function that runs short coroutines which may outlive their caller; await them at the end."""
    tasks: set[asyncio.Task[None]] = set()

    def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = started(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    yield spawn
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def in_background(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine in the background until the context ends."""
    task = started(coroutine)
    try:
        yield
    finally:
        # redis-py may mistake a cancellation for a lost connection: then the task is cancelled again.
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_SECONDS)


def started(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task whose failure is logged, because no caller sees it."""
    task = asyncio.create_task(coroutine, name=getattr(coroutine, "__qualname__", None))
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background_failed", task=task.get_name(), error=repr(error))
