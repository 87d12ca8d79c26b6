"""The client of pushes, against a receiver that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import ProtocolError, PushFailedError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool
from tests.testing.grpc_servers import asyncio_server

WAIT_SECONDS = 10.0
LAYOUT = KvLayout(1, 1, 4, 8, "float16", "model", "float16", "float32-1")
Receive = Callable[[AsyncIterator[pb.PushRequest], Any], AsyncIterator[pb.PushResponse]]


def blocks(start: int, end: int) -> list[Frame]:
    return [Frame(index, b"", bytes([index]) * LAYOUT.block_bytes) for index in range(start, end)]


def credit(num_blocks: int, first_block: int = 0) -> pb.PushResponse:
    granted = pb.PushCredit(num_blocks=num_blocks, transport=pb.TRANSPORT_MESSAGES, first_block=first_block)
    return pb.PushResponse(credit=granted)


COMMITTED = pb.PushResponse(committed=pb.PushCommitted())


class Receiver(kvtransfer_pb2_grpc.KvTransferServiceServicer):
    """Serves pushes by a function of the test."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def Push(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        async for response in self._receive(request_iterator, context):
            yield response


@asynccontextmanager
async def pushing(receive: Receive, num_blocks: int) -> AsyncIterator[BlockPush]:
    """Open a push of a prompt to a running receiver."""
    channels, prompt = ChannelPool(), PromptBlocks(LAYOUT, num_blocks)
    add = kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server
    async with asyncio_server((add, Receiver(receive))) as address:
        ticket = pb.Ticket(ticket_id="ticket", address=address, receiver_epoch="epoch")
        try:
            async with BlockPush(channels, ticket, attempt=3, blocks=prompt, timeout=WAIT_SECONDS) as push:
                yield push
        finally:
            await channels.close()


@settings(max_examples=20)
@given(grants=st.lists(st.integers(1, 4), min_size=1, max_size=8), num_per_message=st.integers(1, 3))
async def test_no_block_is_sent_without_credit(grants: list[int], num_per_message: int) -> None:
    num_blocks = sum(grants)
    received: list[int] = []
    granted: list[int] = []

    async def receive(requests: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        assert (await anext(requests)).open.num_blocks == num_blocks
        for grant in grants:
            # The next credit comes only when the last is used up: a sender that kept some would hang.
            granted.append(grant)
            yield credit(grant)
            while len(received) < sum(granted):
                received.extend(frame.index for frame in (await anext(requests)).frames.frames)
            assert len(received) == sum(granted)
        assert (await anext(requests)).commit.first_token_id == 7
        yield COMMITTED

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "MESSAGE_BYTES", num_per_message * LAYOUT.block_bytes)
        async with pushing(receive, num_blocks) as push:
            await push.send(blocks(0, num_blocks))
            summary = await push.commit(7)
    assert received == list(range(num_blocks))
    assert (summary.num_blocks, summary.num_bytes) == (num_blocks, num_blocks * LAYOUT.block_bytes)


async def test_the_prompt_is_read_no_further_than_one_message_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", LAYOUT.block_bytes)
    taken: list[int] = []
    may_grant, is_stopped = asyncio.Event(), asyncio.Event()

    async def receive(requests: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        await anext(requests)
        yield credit(2)
        for _ in range(2):
            await anext(requests)
        is_stopped.set()
        await may_grant.wait()
        yield credit(2)
        while (await anext(requests)).WhichOneof("message") != "commit":
            pass
        yield COMMITTED

    def lazy() -> Iterator[Frame]:
        for each in blocks(0, 4):
            taken.append(each.index)
            yield each

    async with pushing(receive, 4) as push:
        sending = asyncio.create_task(push.send(lazy()))
        await asyncio.wait_for(is_stopped.wait(), WAIT_SECONDS)
        assert len(taken) <= 3
        assert not sending.done()
        may_grant.set()
        await sending
        await push.commit(None)
    assert taken == [0, 1, 2, 3]


async def test_blocks_that_the_receiver_has_are_not_sent_and_are_counted_as_saved() -> None:
    opened: list[pb.PushOpen] = []

    async def receive(requests: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        opened.append((await anext(requests)).open)
        yield credit(1, first_block=3)
        await anext(requests)
        assert not (await anext(requests)).commit.HasField("first_token_id")
        yield COMMITTED

    async with pushing(receive, 4) as push:
        assert await push.opened() == 3
        await push.send(blocks(3, 4))
        with pytest.raises(ProtocolError, match="more blocks than the 4 of the push"):
            await push.send(blocks(4, 5))
        summary = await push.commit(None)
    [sent] = opened
    assert (sent.ticket_id, sent.receiver_epoch, sent.attempt, sent.num_blocks) == ("ticket", "epoch", 3, 4)
    assert (summary.num_blocks, summary.num_saved_bytes) == (1, 3 * LAYOUT.block_bytes)
    assert summary.credit_wait_seconds <= summary.seconds


async def test_the_refusal_has_precedence_over_the_status_of_the_call() -> None:
    async def receive(requests: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        await anext(requests)
        status = grpc.StatusCode.DATA_LOSS.value[0]
        yield pb.PushResponse(refused=pb.PushRefused(status_code=status, message="block 0 is damaged"))
        raise RuntimeError("scripted")

    async with pushing(receive, 2) as push:
        for failing in (push.send(blocks(0, 2)), push.send(blocks(0, 2)), push.commit(None)):
            with pytest.raises(PushFailedError, match="block 0 is damaged") as refused:
                await failing
            assert refused.value.status is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND),
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_without_a_refusal_the_status_counts_but_a_broken_stream_is_unavailable(
    sent: grpc.StatusCode, seen: grpc.StatusCode
) -> None:
    async def receive(requests: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        await anext(requests)
        yield credit(1)
        # Then the sender waits for credit. gRPC would report the failure of a write instead of the status.
        await anext(requests)
        await context.abort(sent, "scripted")

    async with pushing(receive, 2) as push:
        with pytest.raises(PushFailedError) as failed:
            await push.send(blocks(0, 2))
            await push.commit(None)
        assert failed.value.status is seen


async def test_a_push_that_fails_before_its_commit_ends_the_call() -> None:
    is_ended = asyncio.Event()

    async def receive(requests: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        try:
            await anext(requests)
            yield credit(1)
            await asyncio.Event().wait()
        finally:
            is_ended.set()

    with suppress(RuntimeError):
        async with pushing(receive, 2) as push:
            await push.send(blocks(0, 1))
            raise RuntimeError("the request has failed")
    await asyncio.wait_for(is_ended.wait(), WAIT_SECONDS)
