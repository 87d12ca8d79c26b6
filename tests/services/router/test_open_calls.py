"""The calls that a router serves, and its end."""

from __future__ import annotations

import asyncio

import pytest

from quire.rpc.ended_calls import end_raised
from quire.rpc.errors import Unavailable
from quire.services.router.grpc.open_calls import OpenCalls


async def test_it_ends_with_the_last_call_and_takes_no_new_one() -> None:
    calls = OpenCalls()
    may_end = asyncio.Event()

    async def call() -> None:
        async with calls.entered():
            await may_end.wait()

    calling = asyncio.create_task(call())
    async with calls.entered():
        await asyncio.sleep(0)
        assert calls.number == 2
        finishing = asyncio.create_task(calls.finish())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="stopping") as refused:
            async with calls.entered():
                pass
        assert (refused.value.reason, calls.number) == ("DRAINING", 2)
        assert refused.value.retry_after_seconds is not None
        may_end.set()
        await calling
        await asyncio.sleep(0)
        assert not finishing.done()
    await asyncio.wait_for(finishing, 5)
    assert calls.number == 0


async def test_calls_that_outlast_the_grace_period_end_with_unavailable() -> None:
    calls = OpenCalls()

    async def call() -> None:
        async with calls.entered():
            with end_raised():
                await asyncio.Event().wait()

    calling = [asyncio.create_task(call()) for _ in range(2)]
    finishing = asyncio.create_task(calls.finish())
    await asyncio.sleep(0)
    finishing.cancel()
    for error in await asyncio.gather(*calling, return_exceptions=True):
        assert isinstance(error, Unavailable)
        assert "its time to drain is over" in str(error)
    assert calls.number == 0


async def test_a_call_that_fails_is_no_longer_open() -> None:
    calls = OpenCalls()
    with pytest.raises(RuntimeError):
        async with calls.entered():
            raise RuntimeError("scripted")
    assert calls.number == 0
    calls.check()
    await asyncio.wait_for(calls.finish(), 5)
    with pytest.raises(Unavailable):
        calls.check()
