"""The sending end: pushes one sequence's blocks to a decode worker while later ones are still computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

import grpc
import grpc.aio

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import PushFailedError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import KvLayout
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc

CHANNEL_OPTIONS = [
    # One message carries whole blocks; a 70B model's has 5 MiB, so the default of 4 MiB would refuse it.
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    # Find a peer that vanished without closing its connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class PushSummary(NamedTuple):
    """What a push moved and where its time went."""

    num_blocks: int
    num_bytes: int
    seconds: float
    credit_wait_seconds: float


class ChannelPool:
    """One channel for each receiver, shared by all pushes."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to ``host:port``."""
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()


class BlockPush:
    """One push, as an async context manager; leaving it without ``commit`` takes everything back.

    ::

        async with BlockPush(channel, ticket, ...) as push:
            await push.send([frame, frame])      # returns when the blocks are on their way
            summary = await push.commit(token)   # returns when the receiver has checked and admitted them
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        ticket: pb.Ticket,
        *,
        request_id: str,
        attempt: int,
        layout: KvLayout,
        num_blocks: int,
        timeout: float,
    ) -> None:
        self._stub = kvtransfer_pb2_grpc.KvTransferServiceStub(channel)
        self._timeout = timeout
        self._block_bytes = layout.block_bytes
        self._open = pb.PushOpen(
            ticket_id=ticket.ticket_id,
            receiver_epoch=ticket.receiver_epoch,
            request_id=request_id,
            attempt=attempt,
            layout=layout.to_proto(),
            first_block=ticket.first_block,
            num_blocks=num_blocks,
        )
        self._credit = 0
        self._num_sent = 0
        self._wait_seconds = 0.0

    async def __aenter__(self) -> Self:
        self._start = perf_counter()
        self._call = self._stub.Push(timeout=self._timeout)
        await self._write(pb.PushRequest(open=self._open))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A call that has ended ignores this; one that has not is taken back at the receiver.
        self._call.cancel()

    async def send(self, blocks: Iterable[Frame]) -> None:
        """Send blocks in order, waiting for credit where there is none.

        Raises:
            PushFailedError: the receiver refused, vanished or ran out of time.
        """
        for group in frames.messages(blocks, self._block_bytes):
            while self._credit < len(group):
                self._credit += await self._next_credit()
            # Copying and digesting megabytes would hold up the event loop.
            message = await asyncio.to_thread(_frames_message, group)
            await self._write(message)
            self._credit -= len(group)
            self._num_sent += len(group)

    async def commit(self, first_token_id: int) -> PushSummary:
        """End the push and wait until the receiver has admitted the sequence.

        Raises:
            PushFailedError: the receiver refused, vanished or ran out of time.
        """
        await self._write(pb.PushRequest(commit=pb.PushCommit(first_token_id=first_token_id)))
        while (await self._read()).WhichOneof("message") != "committed":
            pass
        return PushSummary(
            self._num_sent,
            self._num_sent * self._block_bytes,
            perf_counter() - self._start,
            self._wait_seconds,
        )

    async def _next_credit(self) -> int:
        start = perf_counter()
        response = await self._read()
        self._wait_seconds += perf_counter() - start
        return response.credit.num_blocks

    async def _write(self, message: pb.PushRequest) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # A stream that the receiver has ended refuses writes; its status says why it did.
            raise await self._failure() from error

    async def _read(self) -> pb.PushResponse:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise await self._failure() from error
        if not isinstance(response, pb.PushResponse):  # the end of the stream
            raise await self._failure()
        return response

    async def _failure(self) -> PushFailedError:
        return PushFailedError(await self._call.code(), await self._call.details() or "")


def _frames_message(group: list[Frame]) -> pb.PushRequest:
    return pb.PushRequest(frames=pb.PushFrames(frames=[frames.to_proto(frame) for frame in group]))
