"""Channels: shared while they are used, forgotten a while after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio
import pytest

from quire.rpc.channels import IDLE_SECONDS, ChannelPool
from quire.rpc.proof import Peer
from tests.testing.grpc_servers import asyncio_server
from tests.testing.manual_clock import ManualClock
from tests.testing.rpc_errors import error_of

SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


@pytest.fixture
async def pool(clock: ManualClock) -> AsyncIterator[ChannelPool]:
    channels = ChannelPool(clock=clock)
    yield channels
    await channels.close()


async def test_a_worker_has_one_channel_and_another_after_its_restart(pool: ChannelPool) -> None:
    with (
        pool.peer("127.0.0.1:1", "a") as first,
        pool.peer("127.0.0.1:1", "a") as second,
        pool.peer("127.0.0.1:1", "b") as restarted,
        pool.peer("127.0.0.1:2", "a") as other,
    ):
        assert first.channel is second.channel
        assert len({peer.channel for peer in (first, restarted, other)}) == 3


def echoing(may_answer: asyncio.Event) -> AbstractAsyncContextManager[str]:
    """Run a server that answers once it may; yield its address."""

    async def answer(request: bytes, context: Any) -> bytes:
        await may_answer.wait()
        return request

    methods = {"Say": grpc.unary_unary_rpc_method_handler(answer)}
    handler = grpc.method_handlers_generic_handler("test.Echo", methods)
    return asyncio_server((lambda handler, server: server.add_generic_rpc_handlers((handler,)), handler))


@pytest.fixture
def may_answer() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def say(peer: Peer) -> bytes:
    answer: bytes = await peer.unary_unary("/test.Echo/Say")(b"hello", timeout=10)
    return answer


async def test_a_channel_is_closed_some_minutes_after_its_last_user(
    pool: ChannelPool, clock: ManualClock, may_answer: asyncio.Event
) -> None:
    async with echoing(may_answer) as address:
        with pool.peer(address, "a") as first:
            await say(first)
            clock.now += 2 * IDLE_SECONDS
        clock.now += IDLE_SECONDS - 1
        await pool.close_unused()
        assert first.channel.get_state() is not SHUTDOWN
        with pool.peer(address, "a") as again:
            assert again.channel is first.channel
        clock.now += IDLE_SECONDS
        await pool.close_unused()
        assert (len(pool), first.channel.get_state()) == (0, SHUTDOWN)
        with pool.peer(address, "a") as anew:
            assert await say(anew) == b"hello"


async def test_proxies_are_not_used(
    monkeypatch: pytest.MonkeyPatch, pool: ChannelPool, may_answer: asyncio.Event
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with echoing(may_answer) as address:
        with pool.peer(address, "a") as peer:
            assert await say(peer) == b"hello"


async def test_a_call_under_way_is_not_cut(
    pool: ChannelPool, clock: ManualClock, may_answer: asyncio.Event
) -> None:
    may_answer.clear()
    async with echoing(may_answer) as address:
        with pool.peer(address, "a") as peer:
            call = asyncio.ensure_future(say(peer))
            clock.now += 10 * IDLE_SECONDS
            await pool.close_unused()
            may_answer.set()
            assert await call == b"hello"
        clock.now += IDLE_SECONDS
        await pool.close_unused()
        assert len(pool) == 0


async def test_a_channel_to_a_worker_that_has_ended_is_closed(
    pool: ChannelPool, may_answer: asyncio.Event
) -> None:
    """Its channel is idle: only a call would find out that nobody listens there any longer."""
    async with echoing(may_answer) as address:
        with pool.peer(address, "a") as peer:
            await say(peer)
    await peer.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    await pool.close_unused()
    assert (len(pool), peer.channel.get_state()) == (0, SHUTDOWN)


async def test_a_channel_to_a_worker_that_is_gone_is_closed_at_once(
    pool: ChannelPool, unused_tcp_port: int
) -> None:
    with pool.peer(f"127.0.0.1:{unused_tcp_port}", "a") as peer:
        await error_of(peer.unary_unary("/test.Echo/Say")(b"hello", timeout=10), grpc.StatusCode.UNAVAILABLE)
        await pool.close_unused()
        assert len(pool) == 1, "it has a user"
    await pool.close_unused()
    assert (len(pool), peer.channel.get_state()) == (0, SHUTDOWN)
