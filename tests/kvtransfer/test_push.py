"""Pushes over a real server: metrics, credit, refusals and failures. ``test_transports.py`` has the rest."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import (
    DigestMismatchError,
    ProtocolError,
    PushFailedError,
    TransferError,
    UnknownTicketError,
)
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool
from tests.testing.transport_pair import (
    ATTEMPT,
    LAYOUT,
    RECEIVER_EPOCH,
    TICKET,
    WAIT_SECONDS,
    Pair,
    running_pair,
)

FIRST_TOKEN = 42


def block(index: int) -> Frame:
    """Return block ``index``; no two are alike."""
    payload = index.to_bytes(4, "little") * (LAYOUT.block_bytes // 4)
    return Frame(index, b"hash" + index.to_bytes(12, "little"), payload)


def blocks(start: int, end: int) -> list[Frame]:
    return [block(index) for index in range(start, end)]


def stream_to(receiver: Pair) -> Any:
    """Open a stream for messages that a right sender would not send."""
    with receiver.channels.peer(receiver.address, RECEIVER_EPOCH) as peer:
        return kvtransfer_pb2_grpc.KvTransferServiceStub(peer).Push(timeout=WAIT_SECONDS)


def failures(receiver: Pair, reason: str) -> float:
    return receiver.sample("transfer_failures_total", kind="push", reason=reason)


def assert_aborted(receiver: Pair) -> None:
    """Check that the push was aborted once and that its sequence was not admitted."""
    assert len(receiver.target.reasons) == 1
    assert receiver.target.first_token_id is None


def running_receiver(window_blocks: int = 8) -> AbstractAsyncContextManager[Pair]:
    return running_pair(Path(), "messages", "messages", window_blocks=window_blocks)


@pytest.fixture
async def receiver() -> AsyncIterator[Pair]:
    async with running_receiver() as running:
        yield running


async def happened(event: asyncio.Event) -> None:
    """Wait for the event, with a time limit."""
    await asyncio.wait_for(event.wait(), WAIT_SECONDS)


def opening(num_blocks: int, **changes: Any) -> pb.PushRequest:
    fields: dict[str, Any] = {
        "ticket_id": TICKET,
        "receiver_epoch": RECEIVER_EPOCH,
        "attempt": ATTEMPT,
        "layout": layout_to_proto(LAYOUT),
        "num_blocks": num_blocks,
    }
    return pb.PushRequest(open=pb.PushOpen(**(fields | changes)))


def committing() -> pb.PushRequest:
    return pb.PushRequest(commit=pb.PushCommit(first_token_id=FIRST_TOKEN))


async def status_of(call: Any, messages: list[pb.PushRequest]) -> tuple[grpc.StatusCode, str]:
    """Send the messages as they are and return how the receiver ends the call."""

    async def write_all() -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)

    writing = asyncio.create_task(write_all())
    async with asyncio.timeout(WAIT_SECONDS):
        with suppress(grpc.aio.AioRpcError):
            # A call has no status before all that was sent ahead of it is read.
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        await writing
        return await call.code(), await call.details()


# --- what arrives -----------------------------------------------------------------------------------------


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


async def test_a_commit_counts_in_the_senders_metrics(receiver: Pair) -> None:
    registry = CollectorRegistry()
    async with receiver.push(2) as push:
        await push.send(blocks(0, 2))
        TransferMetrics(registry).record_push(await push.commit(FIRST_TOKEN))
    sent = {"direction": "sent"}
    assert registry.get_sample_value("quire_kv_transfer_blocks_total", sent) == 2
    sent_bytes = registry.get_sample_value("quire_kv_transfer_bytes_total", sent | {"transport": "messages"})
    assert sent_bytes == 2 * LAYOUT.block_bytes
    assert registry.get_sample_value("quire_kv_push_seconds_count") == 1
    assert registry.get_sample_value("quire_kv_credit_wait_seconds_count") == 1


async def test_blocks_that_the_receiver_has_are_counted_as_saved(receiver: Pair) -> None:
    registry = CollectorRegistry()
    async with receiver.push(5, first_block=3) as push:
        await push.send(blocks(3, 5))
        TransferMetrics(registry).record_push(await push.commit(FIRST_TOKEN))
    assert registry.get_sample_value("quire_kv_transfer_saved_bytes_total") == 3 * LAYOUT.block_bytes


async def test_a_wait_for_credit_counts_while_it_lasts(receiver: Pair) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(1) as push:
        assert push.credit_wait_seconds == 0
        sending = asyncio.create_task(push.send(blocks(0, 1)))
        await receiver.sink.waiting.wait()
        async with asyncio.timeout(WAIT_SECONDS):
            while not (waited := push.credit_wait_seconds):
                await asyncio.sleep(0)
        receiver.sink.allocates.set()
        await sending
        total = push.credit_wait_seconds
        assert total >= waited
        assert (await push.commit(FIRST_TOKEN)).credit_wait_seconds == total == push.credit_wait_seconds


# --- overlap and back-pressure ----------------------------------------------------------------------------


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


class SlowChannel:
    """A channel of one slow call."""

    def __init__(self, call: SlowCall) -> None:
        self._call = call

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[..., SlowCall]:
        return lambda timeout: self._call


async def test_the_next_chunk_is_prepared_while_the_last_one_is_on_its_way() -> None:
    call = SlowCall()
    prepared = asyncio.Event()
    loop = asyncio.get_running_loop()

    def second_chunk() -> Iterator[Frame]:
        yield block(1)
        loop.call_soon_threadsafe(prepared.set)

    channel: Any = SlowChannel(call)
    push = BlockPush(
        ChannelPool(lambda address, options: channel),
        pb.Ticket(),
        sequence_id="r",
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


async def test_without_credit_blocks_wait_where_they_are(receiver: Pair) -> None:
    receiver.sink.allocates.clear()
    num_read = 0
    first_was_read = asyncio.Event()
    loop = asyncio.get_running_loop()

    def lazily() -> Iterator[Frame]:
        nonlocal num_read
        for frame in blocks(0, 20):
            num_read += 1
            loop.call_soon_threadsafe(first_was_read.set)
            yield frame

    async with receiver.push(20) as push:
        sending = asyncio.create_task(push.send(lazily()))
        await happened(receiver.sink.waiting)
        await happened(first_was_read)
        assert not sending.done()
        assert num_read == 1
        receiver.sink.allocates.set()
        await asyncio.wait_for(sending, WAIT_SECONDS)
        await push.commit(FIRST_TOKEN)
    assert receiver.target.held.keys() == set(range(20))


async def test_a_push_without_credit_ends_at_its_deadline(receiver: Pair) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(2, timeout=0.2) as push:
        with pytest.raises(PushFailedError) as raised:
            await push.send(blocks(0, 2))
    assert raised.value.status == grpc.StatusCode.DEADLINE_EXCEEDED
    await happened(receiver.sink.gave_up)


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "message", "reason"),
    [
        (
            {"layout": replace(LAYOUT, head_dim=16)},
            grpc.StatusCode.FAILED_PRECONDITION,
            "head_dim is 8 here and 16 there",
            "layout_mismatch",
        ),
        ({"epoch": "epoch-0"}, grpc.StatusCode.ABORTED, "restarted", "stale_epoch"),
        ({"attempt": ATTEMPT - 1}, grpc.StatusCode.ABORTED, "older attempt", "stale_attempt"),
        ({"ticket_id": "ticket-0"}, grpc.StatusCode.NOT_FOUND, "no such ticket", "unknown_ticket"),
    ],
    ids=["layout", "epoch", "attempt", "ticket"],
)
@pytest.mark.parametrize("num_blocks", [0, 3])
async def test_a_push_that_is_not_expected_is_refused(
    receiver: Pair,
    num_blocks: int,
    changes: dict[str, Any],
    status: grpc.StatusCode,
    message: str,
    reason: str,
) -> None:
    async with receiver.push(num_blocks, **changes) as push:
        with pytest.raises(PushFailedError, match=message) as raised:
            await push.send(blocks(0, num_blocks))
            await push.commit(FIRST_TOKEN)
    assert raised.value.status == status
    assert receiver.sink.targets == {}
    assert failures(receiver, reason) == 1


async def test_a_ticket_is_good_once(receiver: Pair) -> None:
    async with receiver.push(1) as push:
        await push.send(blocks(0, 1))
        await push.commit(FIRST_TOKEN)
    async with receiver.push(1) as again:
        with pytest.raises(PushFailedError, match="no such ticket"):
            await again.send(blocks(0, 1))
    assert receiver.target.reasons == []


@pytest.mark.parametrize("part", ["payload", "block_hash"])
async def test_a_changed_byte_is_data_loss(receiver: Pair, part: str) -> None:
    message = frames.to_proto(blocks(0, 3))
    damaged = message.frames.frames[1]
    setattr(damaged, part, b"\xff" + getattr(damaged, part)[1:])
    status, details = await status_of(stream_to(receiver), [opening(3), message, committing()])
    assert status == grpc.StatusCode.DATA_LOSS
    assert "block 1" in details
    assert receiver.target.held.keys() == {0}
    assert_aborted(receiver)
    assert failures(receiver, "digest_mismatch") == 1


def carrying(*indices: int) -> pb.PushRequest:
    return frames.to_proto([block(index) for index in indices])


@pytest.mark.parametrize(
    "messages",
    [
        [carrying(3)],
        [carrying(2, 4)],
        [carrying(2, 3, 1)],
        [carrying(*range(2, 7))],
        [carrying(2, 3, 4, 5), carrying(6, 7, 8, 9), carrying(10)],
        [frames.to_proto([replace(block(2), payload=b"short")])],
        [committing()],
        [carrying(2, 3, 4, 5), committing()],
        [opening(10)],
        [pb.PushRequest()],
    ],
    ids=[
        "late",
        "gap",
        "early",
        "overrun",
        "beyond",
        "short",
        "empty commit",
        "early commit",
        "second open",
        "nothing",
    ],
)
async def test_an_invalid_push_is_refused_and_frees_its_blocks(messages: list[pb.PushRequest]) -> None:
    async with running_receiver(window_blocks=4) as receiver:
        call = stream_to(receiver)
        status, _ = await status_of(call, [opening(10, first_block=2), *messages])
        assert status == grpc.StatusCode.INVALID_ARGUMENT
        assert_aborted(receiver)
        assert failures(receiver, "protocol") == 1


async def test_a_push_begins_with_open(receiver: Pair) -> None:
    status, details = await status_of(stream_to(receiver), [carrying(0)])
    assert (status, details) == (grpc.StatusCode.INVALID_ARGUMENT, "a push begins with open")
    assert receiver.sink.targets == {}


async def test_a_duplicate_block_changes_nothing(receiver: Pair) -> None:
    other_bytes = frames.to_proto([replace(block(0), payload=block(7).payload)])
    written: list[int] = []
    receiver.sink.before_write = written.append
    frames_sent = [carrying(0, 1), carrying(0, 1), other_bytes, carrying(1, 2)]
    status, _ = await status_of(stream_to(receiver), [opening(3), *frames_sent, committing()])
    assert status == grpc.StatusCode.OK
    assert written == [0, 1, 2]
    assert receiver.target.held == {index: block(index).payload for index in range(3)}


async def test_a_sender_cannot_send_more_than_it_announced(receiver: Pair) -> None:
    async with receiver.push(2) as push:
        with pytest.raises(ProtocolError, match="more blocks than the 2"):
            await push.send(blocks(0, 3))
    assert receiver.sink.targets.get(TICKET) is None or receiver.target.first_token_id is None


# --- a sender that goes away ------------------------------------------------------------------------------


async def test_a_cancelled_sender_frees_the_blocks(receiver: Pair) -> None:
    async def push_half() -> None:
        async with receiver.push(4) as push:
            await push.send(blocks(0, 2))
            await asyncio.Event().wait()

    pushing = asyncio.create_task(push_half())
    await happened(receiver.sink.opened)
    await happened(receiver.target.progress)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    await happened(receiver.target.ended)
    assert_aborted(receiver)


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


async def test_a_stream_that_ends_without_commit_frees_the_blocks(receiver: Pair) -> None:
    call = stream_to(receiver)
    await call.write(opening(2))
    await call.write(carrying(0, 1))
    await call.done_writing()
    status, _ = await status_of(call, [])
    assert status == grpc.StatusCode.CANCELLED
    assert_aborted(receiver)
    assert failures(receiver, "sender_gone") == 1


SENDER = """
import asyncio, sys, grpc
from quire.protos import kvtransfer_pb2 as pb, kvtransfer_pb2_grpc

async def main(address, *messages):
    call = kvtransfer_pb2_grpc.KvTransferServiceStub(grpc.aio.insecure_channel(address)).Push()
    for message in messages:
        await call.write(pb.PushRequest.FromString(bytes.fromhex(message)))
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_sender_frees_the_blocks(receiver: Pair) -> None:
    messages = [message.SerializeToString().hex() for message in (opening(4), carrying(0, 1))]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER, receiver.address, *messages)
    try:
        await happened(receiver.sink.opened)
        await happened(receiver.target.progress)
    finally:
        process.kill()
        await process.wait()
    await happened(receiver.target.ended)
    assert_aborted(receiver)


# --- a receiver that fails --------------------------------------------------------------------------------


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
        channels,
        pb.Ticket(address=address),
        sequence_id="r",
        attempt=0,
        blocks=PromptBlocks(LAYOUT, 0),
        timeout=WAIT_SECONDS,
    )
    with pytest.raises(PushFailedError) as raised:
        async with asyncio.timeout(WAIT_SECONDS / 2), push:
            await push.commit(FIRST_TOKEN)
    assert raised.value.status == grpc.StatusCode.UNAVAILABLE
    await channels.close()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DigestMismatchError("not the block of these tokens"), grpc.StatusCode.DATA_LOSS),
        (UnknownTicketError("the request has ended"), grpc.StatusCode.NOT_FOUND),
        (TransferError("no more"), grpc.StatusCode.ABORTED),
        (ZeroDivisionError("a bug"), grpc.StatusCode.ABORTED),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("moment", ["write", "commit"])
async def test_a_sink_that_refuses_fails_the_push_and_is_aborted_once(
    receiver: Pair, error: Exception, status: grpc.StatusCode, moment: str
) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(2) as push:
        await happened(receiver.sink.waiting)
        # The target exists only once there is room; tell it what to refuse before a block can come.
        receiver.sink.allocates.set()
        await happened(receiver.sink.opened)
        if moment == "write":
            receiver.target.before_write = Mock(side_effect=error)
        else:
            receiver.target.commit_error = error
        with pytest.raises(PushFailedError, match=str(error)) as raised:
            await push.send(blocks(0, 2))
            await push.commit(FIRST_TOKEN)
    assert raised.value.status == status
    assert_aborted(receiver)
