"""Waiting for a condition that nothing announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

LIMIT_SECONDS = 180.0


async def until(condition: Callable[[], Any]) -> Any:
    """Return what a function returns, once that is true; raise TimeoutError after ``LIMIT_SECONDS``.

    The function may be asynchronous.
    """
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            found = condition()
            if isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.005)
