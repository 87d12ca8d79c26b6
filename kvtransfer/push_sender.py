"""The client of pushes: sends a sequence's blocks to a decode worker while later ones are being computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from time import perf_counter
from typing import NamedTuple, Self

import grpc.aio

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import ProtocolError, PushFailedError
from quire.kvtransfer.frame import Frame, Transport
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.transports.interface import Transports, agreed
from quire.kvtransfer.transports.messages import MESSAGES_ONLY
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class PushSummary(NamedTuple):
    """How much a push moved, and how it spent its time.

    Attributes:
        num_held_blocks: number of blocks that the receiver already had and keeps for the sequence.
        num_saved_bytes: bytes of the blocks that the receiver already had, and that were not sent.
        seconds: time from open to the receiver's acknowledgement.
        credit_wait_seconds: the part of that time in which blocks were ready but there was no credit.
        transport: how the receiver got the blocks.
    """

    num_blocks: int
    num_bytes: int
    num_held_blocks: int
    num_saved_bytes: int
    seconds: float
    credit_wait_seconds: float
    transport: Transport


class PromptBlocks(NamedTuple):
    """The layout and the number of a prompt's blocks."""

    layout: KvLayout
    number: int


class BlockPush:
    """One push, as an async context manager. If it exits without ``commit``, the receiver discards the push.

    ::

        async with BlockPush(channels, ticket, ...) as push:
            first_block = await push.opened()    # returns when the receiver has accepted the sequence
            await push.send([frame, frame])      # returns when the blocks are on their way
            summary = await push.commit(token)   # returns when the receiver has checked and admitted them

    On the wire::

        open ───────────────────► wait until the sequence is accepted; allocate all blocks
             ◄─────────────────── credit: from which block, how many, in messages or out of the sender's pool
        frames ─────────────────► check and write each block; more credit
        commit: first token ────► admit the sequence
             ◄─────────────────── committed, or refused at any time
    """

    def __init__(
        self,
        channels: ChannelPool,
        ticket: pb.Ticket,
        *,
        attempt: int,
        blocks: PromptBlocks,
        timeout: float | None,
        transports: Transports = MESSAGES_ONLY,
    ) -> None:
        self._channels = channels
        self._transports = transports
        self._transport: Transport | None = None
        self._address = ticket.address
        self._in_use = ExitStack()
        self._timeout = timeout
        self._block_bytes = blocks.layout.block_bytes
        self._open = pb.PushOpen(
            ticket_id=ticket.ticket_id,
            receiver_epoch=ticket.receiver_epoch,
            attempt=attempt,
            layout=layout_to_proto(blocks.layout),
            num_blocks=blocks.number,
            shared_pool=transports.offer,
        )
        self._responses: asyncio.Queue[pb.PushResponse | None] = asyncio.Queue()
        self._refused: pb.PushRefused | None = None
        self._unproven: grpc.aio.AioRpcError | None = None
        self._checked = asyncio.Event()
        self._first_block = self._num_left = 0
        self._num_sent = self._num_bytes = 0
        self._credit = 0
        self._credit_wait_seconds = 0.0
        self._waiting_since: float | None = None

    async def __aenter__(self) -> Self:
        self._start = perf_counter()
        self._peer = self._in_use.enter_context(self._channels.peer(self._address, self._open.receiver_epoch))
        self._call = kvtransfer_pb2_grpc.KvTransferServiceStub(self._peer).Push(timeout=self._timeout)
        self._reading = asyncio.create_task(self._read_responses())
        self._writing = asyncio.create_task(self._write_open())
        return self

    async def __aexit__(self, *exception: object) -> None:
        # This does nothing if the call has ended. Otherwise the receiver discards the push.
        self._call.cancel()
        self._reading.cancel()
        self._writing.cancel()
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)
        self._in_use.close()

    async def opened(self) -> int:
        """Wait until the receiver has accepted the sequence; return the index of the first block to send.

        Raises:
            PushFailedError: the receiver refused, vanished or ran out of time.
        """
        if self._transport is None:
            self._first_block = await self._next_credit()
            self._num_left = self._open.num_blocks - self._first_block
        return self._first_block

    async def send(self, blocks: Iterable[Frame]) -> None:
        """Send blocks in order, within the credit; return when the last message is on its way.

        ``blocks`` may be lazy. It is read in a thread, at most one block ahead of the credit. Blocks of a
        shared pool must not change until ``commit`` has returned, since the receiver copies them.

        Raises:
            ProtocolError: there are more blocks than the push was opened for.
            NotSharedError: the receiver chose a transport that is not allowed here.
            PushFailedError: the receiver refused, vanished or ran out of time.
        """
        await self.opened()
        assert self._transport is not None, "the first credit says how the receiver takes blocks"
        transport = self._transport
        pending = self._counted(blocks, transport)
        while True:
            limit = frames.blocks_per_message(self._block_bytes, transport)
            count = min(limit, max(1, self._credit))
            # Copying and digesting megabytes would block the event loop. The previous message is sent
            # meanwhile.
            message = await asyncio.to_thread(frames.to_proto, islice(pending, count), transport)
            if not message.frames.frames:
                return
            num_blocks = frames.num_completed(message.frames.frames)
            if num_blocks > self._num_left:
                raise ProtocolError(f"more blocks than the {self._open.num_blocks} of the push")
            while not self._credit:
                await self._next_credit()
            await self._writing
            self._writing = asyncio.create_task(self._write(message))
            self._credit -= num_blocks
            self._num_left -= num_blocks
            self._num_sent += num_blocks

    def _counted(self, blocks: Iterable[Frame], transport: Transport) -> Iterator[Frame]:
        """Yield the blocks, or their pieces, and count their bytes."""
        for block in blocks:
            self._num_bytes += len(block.payload)
            yield from block.pieces(transport)

    async def commit(self, first_token_id: int | None) -> PushSummary:
        """End the push and wait until the receiver has admitted the sequence.

        Raises:
            PushFailedError: the receiver refused, vanished or ran out of time.
        """
        await self._writing
        await self._write(pb.PushRequest(commit=pb.PushCommit(first_token_id=first_token_id)))
        while (response := await self._response()).WhichOneof("message") != "committed":
            pass
        # Let the receiver end the call, since it would count a cancellation as an error.
        await self._reading
        return PushSummary(
            num_blocks=self._num_sent,
            num_bytes=self._num_bytes,
            num_held_blocks=response.committed.num_held_blocks,
            num_saved_bytes=self._first_block * self._block_bytes,
            seconds=perf_counter() - self._start,
            credit_wait_seconds=self._credit_wait_seconds,
            transport=self._transport or Transport.MESSAGES,
        )

    @property
    def credit_wait_seconds(self) -> float:
        """Seconds so far in which blocks were ready but there was no credit."""
        waiting = perf_counter() - self._waiting_since if self._waiting_since is not None else 0.0
        return self._credit_wait_seconds + waiting

    async def _next_credit(self) -> int:
        """Wait for more credit, and return the index of the push's first block."""
        self._waiting_since = perf_counter()
        credit = (await self._response()).credit
        self._credit_wait_seconds, self._waiting_since = self.credit_wait_seconds, None
        self._credit += credit.num_blocks
        self._transport = agreed(self._transports, credit.transport)
        return credit.first_block

    async def _write_open(self) -> None:
        if self._open.shared_pool.keys:
            # An unproven peer at the address must not get the keys to the whole pool.
            await self._checked.wait()
            if self._unproven is not None:
                raise await self._failure()
        await self._write(pb.PushRequest(open=self._open))

    async def _write(self, message: pb.PushRequest) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # If the receiver has ended the stream, writes fail. The call's status has the reason.
            raise await self._failure() from error

    async def _read_responses(self) -> None:
        """Queue the receiver's messages, and None at the end of the stream.

        The stream must be read continuously. A call has a status only after all its messages have been read.
        With an unread credit, a failed write would wait for its error forever.
        """
        try:
            # Check the peer before using its first credit, so that no block goes to an unproven peer.
            await self._peer.check(self._call)
        except grpc.aio.AioRpcError as error:
            self._unproven = error
        self._checked.set()
        with suppress(grpc.aio.AioRpcError):
            # Iteration reads to the end. ``read`` would stop at a failed write and miss the refusal.
            async for response in self._call:
                if response.WhichOneof("message") == "refused":
                    self._refused = response.refused
                self._responses.put_nowait(response)
        self._responses.put_nowait(None)

    async def _response(self) -> pb.PushResponse:
        response = await self._responses.get()
        if response is None or self._refused is not None:
            self._responses.put_nowait(None)  # The next call must see the end too.
            raise await self._failure()
        return response

    async def _failure(self) -> PushFailedError:
        await asyncio.wait([self._reading])
        if self._refused is not None:
            return PushFailedError(_STATUS_CODES[self._refused.status_code], self._refused.message)
        if self._unproven is not None:
            return PushFailedError(self._unproven.code(), self._unproven.details() or "")
        code, details = await self._call.code(), await self._call.details() or ""
        if code is grpc.StatusCode.INTERNAL:
            # A receiver that fails sends a refusal first. Without one, gRPC reports INTERNAL for a stream
            # that broke during a write.
            code = grpc.StatusCode.UNAVAILABLE
        return PushFailedError(code, details)
