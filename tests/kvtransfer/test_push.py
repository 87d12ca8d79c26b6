"""Pushes over real gRPC into a sink in memory: whole, late, broken, corrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.kvtransfer import frame as frames
from quire.kvtransfer import receiver
from quire.kvtransfer.errors import PushFailedError, StaleAttemptError, UnknownTicketError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import KvLayout
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push import CHANNEL_OPTIONS, BlockPush
from quire.kvtransfer.receiver import KvTransferServicer
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc

LAYOUT = KvLayout(2, 2, 16, 32, "float32", "digest")
TIMEOUT = 10.0


class Sink:
    """A decode worker's memory, reduced to a dict; ``allocate`` opens the gate to its blocks."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.epoch = "now"
        self.allocate = asyncio.Event()
        self.allocate.set()
        self.blocks: dict[int, bytes] = {}
        self.first_token: int | None = None
        self.ended = asyncio.Event()
        self.end_reason: str | None = None
        self.server: grpc.aio.Server | None = None

    async def server_stop(self) -> None:
        assert self.server is not None
        await self.server.stop(None)

    async def open(self, request: pb.PushOpen) -> Sink:
        if request.ticket_id != "ticket":
            raise UnknownTicketError("no such ticket")
        if request.attempt != 0:
            raise StaleAttemptError("an old attempt")
        await self.allocate.wait()
        return self

    def write(self, frame: Frame) -> None:
        assert frame.index not in self.blocks
        self.blocks[frame.index] = frame.payload

    async def commit(self, first_token_id: int) -> None:
        self.first_token = first_token_id

    def abort(self, reason: str) -> None:
        if self.first_token is None:
            self.blocks.clear()
            self.end_reason = reason
        self.ended.set()


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[Sink, grpc.aio.Channel]]:
    sink = Sink()
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    servicer = KvTransferServicer(sink, TransferMetrics(CollectorRegistry()))
    kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
    sink.server = server
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            yield sink, channel
    finally:
        await server.stop(None)


def block(index: int, fill: int | None = None) -> Frame:
    payload = bytes([index % 251 if fill is None else fill]) * LAYOUT.block_bytes
    return Frame(index, index.to_bytes(16, "little"), payload)


def make_push(channel: grpc.aio.Channel, num_blocks: int, **changes: Any) -> BlockPush:
    values = {
        "ticket_id": "ticket",
        "receiver_epoch": "now",
        "first_block": 0,
        "attempt": 0,
        "layout": LAYOUT,
    }
    values.update(changes)
    ticket = pb.Ticket(
        ticket_id=values["ticket_id"],
        receiver_epoch=values["receiver_epoch"],
        first_block=values["first_block"],
    )
    return BlockPush(
        channel,
        ticket,
        request_id="r",
        attempt=values["attempt"],
        layout=values["layout"],
        num_blocks=num_blocks,
        timeout=TIMEOUT,
    )


@pytest.mark.parametrize("num_blocks", [1, 2, 500])
@pytest.mark.parametrize("per_send", [1, 7])
@pytest.mark.parametrize("credit_bytes", [1, LAYOUT.block_bytes * 300])
async def test_every_block_arrives_however_it_is_cut(
    num_blocks: int, per_send: int, credit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "CREDIT_BYTES", credit_bytes)
    monkeypatch.setattr(frames, "MESSAGE_BYTES", min(credit_bytes, frames.MESSAGE_BYTES))
    async with receiving() as (sink, channel):
        async with make_push(channel, num_blocks) as push:
            for first in range(0, num_blocks, per_send):
                await push.send(block(i) for i in range(first, min(num_blocks, first + per_send)))
            summary = await push.commit(42)
        assert sink.blocks == {i: block(i).payload for i in range(num_blocks)}
        assert sink.first_token == 42
        assert (summary.num_blocks, summary.num_bytes) == (num_blocks, num_blocks * LAYOUT.block_bytes)


async def test_nothing_to_send_still_commits() -> None:
    async with receiving() as (sink, channel):
        async with make_push(channel, 3, first_block=3) as push:
            summary = await push.commit(7)
        assert (sink.first_token, summary.num_blocks) == (7, 0)


async def test_no_credit_before_the_blocks_are_allocated() -> None:
    async with receiving() as (sink, channel):
        sink.allocate.clear()
        async with make_push(channel, 2) as push:
            sending = asyncio.create_task(push.send([block(0), block(1)]))
            done, _ = await asyncio.wait([sending], timeout=0.1)
            assert not done
            assert not sink.blocks
            sink.allocate.set()
            await sending
            summary = await push.commit(1)
        assert summary.credit_wait_seconds > 0.05


REFUSALS: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"ticket_id": "other"}, grpc.StatusCode.NOT_FOUND, "no such ticket"),
    ({"receiver_epoch": "before"}, grpc.StatusCode.ABORTED, "restarted"),
    ({"attempt": 1}, grpc.StatusCode.ABORTED, "old attempt"),
    (
        {"layout": replace(LAYOUT, head_dim=64, dtype="bfloat16")},
        grpc.StatusCode.FAILED_PRECONDITION,
        "head_dim is 32 here and 64 there; dtype is float32 here and bfloat16 there",
    ),
]


@pytest.mark.parametrize(("changes", "status", "message"), REFUSALS)
async def test_refusals_say_why(changes: dict[str, Any], status: grpc.StatusCode, message: str) -> None:
    async with receiving() as (sink, channel):
        with pytest.raises(PushFailedError, match=message) as failure:
            async with make_push(channel, 1, **changes) as push:
                await push.send([block(0)])
                await push.commit(1)
        assert failure.value.status == status
        assert not sink.blocks


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([0, 2], grpc.StatusCode.INVALID_ARGUMENT),
        ([1], grpc.StatusCode.INVALID_ARGUMENT),
        ([0], grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_gaps_are_refused(sent: list[int], status: grpc.StatusCode) -> None:
    async with receiving() as (sink, channel):
        with pytest.raises(PushFailedError) as failure:
            async with make_push(channel, 2) as push:
                await push.send(map(block, sent))
                await push.commit(1)
        assert failure.value.status == status
        await asyncio.wait_for(sink.ended.wait(), TIMEOUT)
        assert sink.first_token is None
        assert not sink.blocks


async def test_a_duplicate_changes_nothing() -> None:
    async with receiving() as (sink, channel):
        async with make_push(channel, 2) as push:
            await push.send([block(0)])
            push._credit += 1
            await push.send([block(0, fill=99), block(1)])
            await push.commit(1)
        assert sink.blocks == {0: block(0).payload, 1: block(1).payload}


async def test_a_changed_byte_is_data_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    to_proto = frames.to_proto

    def corrupt(frame: Frame) -> pb.BlockFrame:
        message = to_proto(frame)
        message.payload = b"!" + message.payload[1:]
        return message

    monkeypatch.setattr(frames, "to_proto", corrupt)
    async with receiving() as (sink, channel):
        with pytest.raises(PushFailedError) as failure:
            async with make_push(channel, 1) as push:
                await push.send([block(0)])
                await push.commit(1)
        assert failure.value.status == grpc.StatusCode.DATA_LOSS
        await asyncio.wait_for(sink.ended.wait(), TIMEOUT)
        assert not sink.blocks


async def test_the_digest_binds_the_bytes_to_the_name() -> None:
    message = frames.to_proto(block(1))
    message.block_hash = block(2).block_hash
    with pytest.raises(frames.DigestMismatchError):
        frames.from_proto(message)


async def test_a_sender_that_leaves_takes_everything_back() -> None:
    async with receiving() as (sink, channel):
        async with make_push(channel, 2) as push:
            await push.send([block(0)])
        await asyncio.wait_for(sink.ended.wait(), TIMEOUT)
        assert sink.end_reason is not None
        assert not sink.blocks
        assert sink.first_token is None


async def test_a_receiver_that_vanishes_is_an_error_at_once() -> None:
    async with receiving() as (sink, channel):
        sink.allocate.clear()
        push = make_push(channel, 2)
        async with push:
            sending = asyncio.create_task(push.send([block(0)]))
            await asyncio.sleep(0)
            await sink.server_stop()
            with pytest.raises(PushFailedError):
                await asyncio.wait_for(sending, TIMEOUT / 2)
