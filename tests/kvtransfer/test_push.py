"""Pushes over a real server: side by side, while they wait, and where no server answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quire.kvtransfer.errors import PushFailedError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.protos import kvtransfer_pb2 as pb
from quire.rpc.channels import ChannelPool
from tests.testing.transport_pair import ATTEMPT, LAYOUT, WAIT_SECONDS, Pair, running_pair
from tests.testing.until import until

FIRST_TOKEN = 42


def block(index: int) -> Frame:
    """Return block ``index``; no two are alike."""
    payload = index.to_bytes(4, "little") * (LAYOUT.block_bytes // 4)
    return Frame(index, b"hash" + index.to_bytes(12, "little"), payload)


def blocks(start: int, end: int) -> list[Frame]:
    return [block(index) for index in range(start, end)]


def running_receiver() -> AbstractAsyncContextManager[Pair]:
    return running_pair(Path(), "messages", "messages")


@pytest.fixture
async def receiver() -> AsyncIterator[Pair]:
    async with running_receiver() as running:
        yield running


async def happened(event: asyncio.Event) -> None:
    """Wait for the event, with a time limit."""
    await asyncio.wait_for(event.wait(), WAIT_SECONDS)


async def test_pushes_share_a_channel(receiver: Pair) -> None:
    receiver.sink.tickets = {f"ticket-{number}": ATTEMPT for number in range(10)}

    async def push_all(number: int) -> None:
        async with receiver.push(30 + number, ticket_id=f"ticket-{number}") as push:
            await push.send(blocks(0, 30 + number))
            await push.commit(number)

    await asyncio.gather(*map(push_all, range(10)))
    for number in range(10):
        target = receiver.sink.targets[f"ticket-{number}"]
        assert target.held == {index: block(index).payload for index in range(30 + number)}
        assert target.first_token_id == number


async def test_a_wait_for_credit_counts_while_it_lasts(receiver: Pair) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(1) as push:
        assert push.credit_wait_seconds == 0
        sending = asyncio.create_task(push.send(blocks(0, 1)))
        await receiver.sink.waiting.wait()
        waited = await until(lambda: push.credit_wait_seconds)
        receiver.sink.allocates.set()
        await sending
        total = push.credit_wait_seconds
        assert total >= waited
        assert (await push.commit(FIRST_TOKEN)).credit_wait_seconds == total == push.credit_wait_seconds


class SlowCall:
    """A call whose network takes no frames until ``takes`` is set, and whose receiver gives much credit."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.responses: asyncio.Queue[pb.PushResponse] = asyncio.Queue()
        self.responses.put_nowait(
            pb.PushResponse(credit=pb.PushCredit(num_blocks=100, transport=pb.TRANSPORT_MESSAGES))
        )
        self.written: list[int] = []

    async def write(self, message: pb.PushRequest) -> None:
        if message.WhichOneof("message") == "frames":
            await self.takes.wait()
            self.written.extend(frame.index for frame in message.frames.frames)

    async def __aiter__(self) -> AsyncIterator[pb.PushResponse]:
        while True:
            yield await self.responses.get()

    def cancel(self) -> None:
        pass


async def test_the_next_chunk_is_prepared_while_the_last_one_is_on_its_way() -> None:
    call = SlowCall()
    prepared = asyncio.Event()
    loop = asyncio.get_running_loop()

    def second_chunk() -> Iterator[Frame]:
        yield block(1)
        loop.call_soon_threadsafe(prepared.set)

    channel: Any = SimpleNamespace(stream_stream=lambda *_, **__: lambda timeout: call)
    push = BlockPush(
        ChannelPool(lambda address, options: channel),
        pb.Ticket(),
        attempt=0,
        blocks=PromptBlocks(LAYOUT, 2),
        timeout=WAIT_SECONDS,
    )
    async with push:
        await asyncio.wait_for(push.send([block(0)]), WAIT_SECONDS)
        assert call.written == [], "send returns before the network has taken the message"
        sending = asyncio.create_task(push.send(second_chunk()))
        await happened(prepared)
        assert call.written == []
        assert not sending.done(), "no more than one message waits for the network"
        call.takes.set()
        await asyncio.wait_for(sending, WAIT_SECONDS)
    assert call.written[0] == 0


async def test_a_push_without_credit_ends_at_its_deadline(receiver: Pair) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(2, timeout=0.2) as push:
        with pytest.raises(PushFailedError) as raised:
            await push.send(blocks(0, 2))
    assert raised.value.status == grpc.StatusCode.DEADLINE_EXCEEDED
    await happened(receiver.sink.gave_up)


async def test_a_sender_cancelled_while_it_waits_for_blocks_reserves_none(receiver: Pair) -> None:
    receiver.sink.allocates.clear()

    async def push_all() -> None:
        async with receiver.push(4) as push:
            await push.send(blocks(0, 4))

    pushing = asyncio.create_task(push_all())
    await happened(receiver.sink.waiting)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    await happened(receiver.sink.gave_up)
    assert receiver.sink.targets == {}


async def test_a_receiver_that_stops_fails_a_push_that_waits_for_credit(receiver: Pair) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(4) as push:
        sending = asyncio.create_task(push.send(blocks(0, 4)))
        await happened(receiver.sink.waiting)
        await receiver.server.stop(None)
        with pytest.raises(PushFailedError):
            await asyncio.wait_for(sending, WAIT_SECONDS / 2)
    assert receiver.sink.targets == {}


async def test_an_address_where_no_server_listens_fails_the_push_at_once() -> None:
    channels = ChannelPool()
    async with running_receiver() as receiver:
        address = receiver.address
    push = BlockPush(
        channels, pb.Ticket(address=address), attempt=0, blocks=PromptBlocks(LAYOUT, 0), timeout=WAIT_SECONDS
    )
    with pytest.raises(PushFailedError) as raised:
        async with asyncio.timeout(WAIT_SECONDS / 2), push:
            await push.commit(FIRST_TOKEN)
    assert raised.value.status == grpc.StatusCode.UNAVAILABLE
    await channels.close()
