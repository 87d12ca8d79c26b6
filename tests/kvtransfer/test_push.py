"""Pushes over a real server: metrics, credit, refusals and failures. ``test_transports.py`` has the rest."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import (
    DigestMismatchError,
    ProtocolError,
    PushFailedError,
    StaleAttemptError,
    TransferError,
    UnknownTicketError,
)
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push_receiver import KvTransferServicer
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool

WAIT_SECONDS = 10.0
LAYOUT = KvLayout(2, 2, 4, 8, "float16", "model-a", "float16", "cpu")
EPOCH = "epoch-1"
TICKET = "ticket-1"
ATTEMPT = 3
FIRST_TOKEN = 42


def block(index: int) -> Frame:
    """Return block ``index``; no two are alike."""
    payload = index.to_bytes(4, "little") * (LAYOUT.block_bytes // 4)
    return Frame(index, b"hash" + index.to_bytes(12, "little"), payload)


def blocks(start: int, end: int) -> list[Frame]:
    return [block(index) for index in range(start, end)]


class MemorySink:
    """Keeps blocks in memory; allocates them while ``allocates`` is set."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.epoch = EPOCH
        self.tickets = {TICKET: ATTEMPT}
        self.reservations: dict[str, MemoryReservation] = {}
        self.waiting = asyncio.Event()
        self.allocates = asyncio.Event()
        self.allocates.set()
        self.gave_up = asyncio.Event()
        self.opened = asyncio.Event()

    async def open(self, request: pb.PushOpen) -> MemoryReservation:
        if request.ticket_id not in self.tickets:
            raise UnknownTicketError("no such ticket")
        if self.tickets[request.ticket_id] != request.attempt:
            raise StaleAttemptError("an older attempt")
        del self.tickets[request.ticket_id]
        self.waiting.set()
        try:
            await self.allocates.wait()
        except asyncio.CancelledError:
            self.gave_up.set()
            raise
        reservation = self.reservations[request.ticket_id] = MemoryReservation()
        self.opened.set()
        return reservation


class MemoryReservation:
    """Blocks that have arrived, and how the push ended."""

    def __init__(self) -> None:
        self.held: dict[int, Frame] = {}
        self.written: list[int] = []
        self.write_error: Exception | None = None
        self.commit_error: Exception | None = None
        self.first_token_id: int | None = None
        self.abort_reasons: list[str] = []
        self.ended = asyncio.Event()
        self.progress = asyncio.Event()

    def write(self, frame: Frame) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.written.append(frame.index)
        self.held[frame.index] = frame
        self.progress.set()

    async def commit(self, first_token_id: int | None) -> None:
        if self.commit_error is not None:
            raise self.commit_error
        self.first_token_id = first_token_id
        self.ended.set()

    def abort(self, reason: str) -> None:
        self.abort_reasons.append(reason)
        self.held.clear()
        self.ended.set()


@dataclass
class Receiver:
    """A running receiver, and how to push to it."""

    server: grpc.aio.Server
    address: str
    sink: MemorySink = field(default_factory=MemorySink)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    channels: ChannelPool = field(default_factory=ChannelPool)

    def push(self, num_blocks: int, *, first_block: int = 0, **changes: Any) -> BlockPush:
        """Return a push that is right but for the changes."""
        ticket = pb.Ticket(
            ticket_id=changes.pop("ticket_id", TICKET),
            address=self.address,
            receiver_epoch=changes.pop("epoch", EPOCH),
            first_block=first_block,
        )
        blocks = PromptBlocks(changes.pop("layout", LAYOUT), num_blocks)
        arguments: dict[str, Any] = {"sequence_id": "r", "attempt": ATTEMPT, "timeout": WAIT_SECONDS}
        return BlockPush(self.channels, ticket, blocks=blocks, **(arguments | changes))

    def stream(self) -> Any:
        """Open a stream for messages that a right sender would not send."""
        with self.channels.peer(self.address, EPOCH) as peer:
            return kvtransfer_pb2_grpc.KvTransferServiceStub(peer).Push(timeout=WAIT_SECONDS)

    @property
    def reservation(self) -> MemoryReservation:
        return self.sink.reservations[TICKET]

    def sample(self, name: str, **labels: str) -> float:
        """Return a metric's value."""
        return self.registry.get_sample_value(f"quire_kv_{name}", labels) or 0.0

    def failures(self, reason: str) -> float:
        return self.sample("transfer_failures_total", kind="push", reason=reason)

    def assert_nothing_is_left(self) -> None:
        """Check that the push was aborted once and that nothing of it was admitted or kept."""
        assert len(self.reservation.abort_reasons) == 1
        assert self.reservation.first_token_id is None
        assert self.reservation.held == {}


@asynccontextmanager
async def running_receiver(window_blocks: int = 8) -> AsyncIterator[Receiver]:
    server = grpc.aio.server()
    receiver = Receiver(server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    metrics = TransferMetrics(receiver.registry)
    servicer = KvTransferServicer(
        receiver.sink, metrics, window_bytes=window_blocks * receiver.sink.layout.block_bytes
    )
    kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
    await server.start()
    try:
        yield receiver
    finally:
        await receiver.channels.close()
        await server.stop(None)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_receiver() as running:
        yield running


async def happened(event: asyncio.Event) -> None:
    """Wait for the event, with a time limit."""
    await asyncio.wait_for(event.wait(), WAIT_SECONDS)


def opening(num_blocks: int, **changes: Any) -> pb.PushRequest:
    fields: dict[str, Any] = {
        "ticket_id": TICKET,
        "receiver_epoch": EPOCH,
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


async def test_pushes_share_a_channel(receiver: Receiver) -> None:
    receiver.sink.tickets = {f"ticket-{number}": ATTEMPT for number in range(10)}

    async def push_all(number: int) -> None:
        async with receiver.push(30 + number, ticket_id=f"ticket-{number}") as push:
            await push.send(blocks(0, 30 + number))
            await push.commit(number)

    await asyncio.gather(*map(push_all, range(10)))
    for number in range(10):
        reservation = receiver.sink.reservations[f"ticket-{number}"]
        assert reservation.held == {index: block(index) for index in range(30 + number)}
        assert reservation.first_token_id == number


async def test_a_commit_counts_in_the_senders_metrics(receiver: Receiver) -> None:
    registry = CollectorRegistry()
    async with receiver.push(2) as push:
        await push.send(blocks(0, 2))
        TransferMetrics(registry).record_push(await push.commit(FIRST_TOKEN))
    sent = {"direction": "sent"}
    assert registry.get_sample_value("quire_kv_transfer_blocks_total", sent) == 2
    sent_bytes = registry.get_sample_value("quire_kv_transfer_bytes_total", sent | {"transport": "grpc"})
    assert sent_bytes == 2 * LAYOUT.block_bytes
    assert registry.get_sample_value("quire_kv_push_seconds_count") == 1
    assert registry.get_sample_value("quire_kv_credit_wait_seconds_count") == 1


async def test_blocks_that_the_receiver_has_are_counted_as_saved(receiver: Receiver) -> None:
    registry = CollectorRegistry()
    async with receiver.push(5, first_block=3) as push:
        await push.send(blocks(3, 5))
        TransferMetrics(registry).record_push(await push.commit(FIRST_TOKEN))
    assert registry.get_sample_value("quire_kv_transfer_saved_bytes_total") == 3 * LAYOUT.block_bytes


async def test_a_wait_for_credit_counts_while_it_lasts(receiver: Receiver) -> None:
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


async def test_without_credit_blocks_wait_where_they_are(receiver: Receiver) -> None:
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
    assert receiver.reservation.held.keys() == set(range(20))


async def test_a_push_without_credit_ends_at_its_deadline(receiver: Receiver) -> None:
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
    receiver: Receiver,
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
    assert receiver.sink.reservations == {}
    assert receiver.failures(reason) == 1


async def test_a_ticket_is_good_once(receiver: Receiver) -> None:
    async with receiver.push(1) as push:
        await push.send(blocks(0, 1))
        await push.commit(FIRST_TOKEN)
    async with receiver.push(1) as again:
        with pytest.raises(PushFailedError, match="no such ticket"):
            await again.send(blocks(0, 1))
    assert receiver.reservation.abort_reasons == []


@pytest.mark.parametrize("part", ["payload", "block_hash"])
async def test_a_changed_byte_is_data_loss(receiver: Receiver, part: str) -> None:
    message = frames.to_proto(blocks(0, 3))
    damaged = message.frames.frames[1]
    setattr(damaged, part, b"\xff" + getattr(damaged, part)[1:])
    status, details = await status_of(receiver.stream(), [opening(3), message, committing()])
    assert status == grpc.StatusCode.DATA_LOSS
    assert "block 1" in details
    assert receiver.reservation.written == [0]
    receiver.assert_nothing_is_left()
    assert receiver.failures("digest_mismatch") == 1


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
        call = receiver.stream()
        status, _ = await status_of(call, [opening(10, first_block=2), *messages])
        assert status == grpc.StatusCode.INVALID_ARGUMENT
        receiver.assert_nothing_is_left()
        assert receiver.failures("protocol") == 1


async def test_a_push_begins_with_open(receiver: Receiver) -> None:
    status, details = await status_of(receiver.stream(), [carrying(0)])
    assert (status, details) == (grpc.StatusCode.INVALID_ARGUMENT, "a push begins with open")
    assert receiver.sink.reservations == {}


async def test_a_duplicate_block_changes_nothing(receiver: Receiver) -> None:
    other_bytes = frames.to_proto([replace(block(0), payload=block(7).payload)])
    frames_sent = [carrying(0, 1), carrying(0, 1), other_bytes, carrying(1, 2)]
    status, _ = await status_of(receiver.stream(), [opening(3), *frames_sent, committing()])
    assert status == grpc.StatusCode.OK
    assert receiver.reservation.written == [0, 1, 2]
    assert receiver.reservation.held == {index: block(index) for index in range(3)}


async def test_a_sender_cannot_send_more_than_it_announced(receiver: Receiver) -> None:
    async with receiver.push(2) as push:
        with pytest.raises(ProtocolError, match="more blocks than the 2"):
            await push.send(blocks(0, 3))
    assert receiver.sink.reservations.get(TICKET) is None or receiver.reservation.first_token_id is None


# --- a sender that goes away ------------------------------------------------------------------------------


async def test_a_cancelled_sender_frees_the_blocks(receiver: Receiver) -> None:
    async def push_half() -> None:
        async with receiver.push(4) as push:
            await push.send(blocks(0, 2))
            await asyncio.Event().wait()

    pushing = asyncio.create_task(push_half())
    await happened(receiver.sink.opened)
    await happened(receiver.reservation.progress)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    await happened(receiver.reservation.ended)
    receiver.assert_nothing_is_left()


async def test_a_sender_cancelled_while_it_waits_for_blocks_reserves_none(receiver: Receiver) -> None:
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
    assert receiver.sink.reservations == {}


async def test_a_stream_that_ends_without_commit_frees_the_blocks(receiver: Receiver) -> None:
    call = receiver.stream()
    await call.write(opening(2))
    await call.write(carrying(0, 1))
    await call.done_writing()
    status, _ = await status_of(call, [])
    assert status == grpc.StatusCode.CANCELLED
    receiver.assert_nothing_is_left()
    assert receiver.failures("sender_gone") == 1


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


async def test_a_killed_sender_frees_the_blocks(receiver: Receiver) -> None:
    messages = [message.SerializeToString().hex() for message in (opening(4), carrying(0, 1))]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER, receiver.address, *messages)
    try:
        await happened(receiver.sink.opened)
        await happened(receiver.reservation.progress)
    finally:
        process.kill()
        await process.wait()
    await happened(receiver.reservation.ended)
    receiver.assert_nothing_is_left()


# --- a receiver that fails --------------------------------------------------------------------------------


async def test_a_receiver_that_stops_fails_a_push_that_waits_for_credit(receiver: Receiver) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(4) as push:
        sending = asyncio.create_task(push.send(blocks(0, 4)))
        await happened(receiver.sink.waiting)
        await receiver.server.stop(None)
        with pytest.raises(PushFailedError):
            await asyncio.wait_for(sending, WAIT_SECONDS / 2)
    assert receiver.sink.reservations == {}


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
@pytest.mark.parametrize("moment", ["write_error", "commit_error"])
async def test_a_sink_that_refuses_fails_the_push_and_is_aborted_once(
    receiver: Receiver, error: Exception, status: grpc.StatusCode, moment: str
) -> None:
    receiver.sink.allocates.clear()
    async with receiver.push(2) as push:
        await happened(receiver.sink.waiting)
        # The reservation exists only once there is room; tell it what to refuse before a block can come.
        receiver.sink.allocates.set()
        await happened(receiver.sink.opened)
        setattr(receiver.reservation, moment, error)
        with pytest.raises(PushFailedError, match=str(error)) as raised:
            await push.send(blocks(0, 2))
            await push.commit(FIRST_TOKEN)
    assert raised.value.status == status
    receiver.assert_nothing_is_left()
