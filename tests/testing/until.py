"""Waiting for a condition that nothing announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_SECONDS = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Return once a condition holds; raise TimeoutError if it does not in ``LIMIT_SECONDS``."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)
