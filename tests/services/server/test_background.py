"""Tasks in the background: a failure is logged, and no task outlives its owner."""

from __future__ import annotations

import asyncio
import io

from quire.services.server.background import background, in_background
from quire.services.server.log import configure_logging


async def test_a_task_that_fails_is_logged_by_its_name() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    has_failed = asyncio.Event()

    async def fail_soon() -> None:
        has_failed.set()
        raise ValueError("no")

    async with in_background(fail_soon()):
        await has_failed.wait()
    async with background() as spawn:
        spawn(fail_soon())
    assert stream.getvalue().count("background_failed") == stream.getvalue().count("fail_soon") == 2


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    num_cancelled = 0

    async def stay() -> None:
        nonlocal num_cancelled
        while num_cancelled < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                num_cancelled += 1

    async with in_background(stay()):
        await asyncio.sleep(0)
    assert num_cancelled == 2
