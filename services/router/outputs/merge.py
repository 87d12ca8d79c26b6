"""Merges several streams into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")

QUEUE_SIZE = 16
"""Number of items that may wait for a slow reader before the streams wait too."""


async def merged(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all streams as they arrive; the first error ends all streams and is raised."""
    items: asyncio.Queue[T] = asyncio.Queue(QUEUE_SIZE)

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await items.put(item)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    all_done = asyncio.gather(*tasks)
    getting: asyncio.Task[T] | None = None
    try:
        while not (all_done.done() and items.empty()):
            getting = asyncio.create_task(items.get())
            either: tuple[asyncio.Future[Any], ...] = (getting, all_done)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if all_done.done():
                await all_done
            if getting.done():
                yield getting.result()
            else:
                getting.cancel()
    finally:
        for task in (*tasks, getting):
            if task is not None:
                task.cancel()
        await asyncio.gather(all_done, *tasks, return_exceptions=True)
