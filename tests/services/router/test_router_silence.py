"""Answers that are silent for longer than three pings, on the way from worker to router to client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.client import AsyncClient

SILENT_SECONDS = 6.0
"""Time for five hastened pings; a server without its limit for them ends the connection at the fourth."""


@pytest.mark.slow
async def test_silent_answers_continue(hastened_pings: None, cluster: Any) -> None:
    """One answer is silent before its first token, one in its middle."""
    workers = [await cluster.add(f"d{index}", "decode", is_quiet=True) for index in range(2)]
    await cluster.start()
    for worker, before_token in zip(workers, (0, 2), strict=True):
        worker._before_token = pause_at(before_token)

    async def ask(client: AsyncClient, first_token: int) -> tuple[list[int], int]:
        tokens: list[int] = []
        async for delta in client.stream([first_token, 6, 7]):
            tokens += delta.token_ids
        assert delta.usage is not None
        return tokens, delta.usage.retries

    async with AsyncClient(cluster.running.address) as client:
        answers = await asyncio.gather(*(ask(client, first_token) for first_token in range(5, 9)))
    assert answers == [(cluster.script.answer, 0)] * 4
    assert all(worker.calls for worker in workers)


def pause_at(before_token: int) -> Callable[[int], Awaitable[None]]:
    async def pause(count: int) -> None:
        if count == before_token:
            await asyncio.sleep(SILENT_SECONDS)

    return pause
