"""Brings blocks from this worker's own disk into host memory, before they are looked for there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineThread


async def prefetched(engine: EngineThread, begin: Callable[[Engine, Callable[[], None]], bool]) -> None:
    """Return when what the disk has of a chain is in host memory, as far as there is room.

    Args:
        engine: where.
        begin: begins it, as ``Engine.prefetch`` does, with what to call at the end.

    Raises:
        EngineStoppedError: the engine has stopped.
    """
    loop = asyncio.get_running_loop()
    has_come: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not has_come.done():
            has_come.set_result(None)

    def on_done() -> None:
        loop.call_soon_threadsafe(settle)

    if await engine.call(lambda e: begin(e, on_done)):
        await has_come
