"""Streams that become one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from quire.services.router.outputs.merge import QUEUE_SIZE, merged


class Streams:
    """Streams of numbers, and which of them have been closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def count(self, name: str, end: int, error: Exception | None = None) -> AsyncGenerator[str, None]:
        try:
            for number in range(end):
                await asyncio.sleep(0)
                yield f"{name}{number}"
            if error is not None:
                raise error
            if name == "endless":
                await asyncio.Event().wait()
        finally:
            self.closed.append(name)


async def test_every_item_arrives_and_each_stream_keeps_its_order() -> None:
    streams = Streams()
    length = 3 * QUEUE_SIZE
    items = [item async for item in merged([streams.count("a", length), streams.count("b", length)])]
    for name in "ab":
        assert [item for item in items if item[0] == name] == [f"{name}{i}" for i in range(length)]


async def test_an_error_ends_all() -> None:
    streams = Streams()
    with pytest.raises(ValueError, match="lost"):
        async for _ in merged([streams.count("endless", 1), streams.count("b", 2, ValueError("lost"))]):
            pass
    assert sorted(streams.closed) == ["b", "endless"]


async def test_closing_the_merged_stream_closes_all() -> None:
    streams = Streams()
    async with aclosing(merged([streams.count("endless", 1), streams.count("b", 100)])) as items:
        assert await anext(items)
        await anext(items)
    assert sorted(streams.closed) == ["b", "endless"]


async def test_no_streams_are_no_items() -> None:
    no_streams: list[AsyncGenerator[str, None]] = []
    assert [item async for item in merged(no_streams)] == []
