"""The server of pushes: checks each block before it is written, and admits only complete sequences."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

import grpc

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.credit import CreditWindow
from quire.kvtransfer.errors import ProtocolError, SenderGoneError, StaleEpochError, TransferError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import layout_from_proto, require_equal
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.transports.interface import Intake, Transports
from quire.kvtransfer.transports.messages import MESSAGES_ONLY
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc

WINDOW_BYTES = 64 << 20
"""Most bytes of one push that may be in flight."""


class Reservation(Protocol):
    """Blocks that one push may fill.

    Attributes:
        first_block: index of the first of them; the receiver has the blocks before it.
        num_held_blocks: number of those that it keeps for the sequence.
    """

    first_block: int
    num_held_blocks: int

    def write(self, frame: Frame) -> None:
        """Write a block and let the frame check the copy; called in a thread.

        If ``abort`` has ended the request, write nothing.

        Raises:
            TransferError: it is the wrong block, its copy is damaged, or the request has ended.
        """

    async def commit(self, first_token_id: int | None) -> None:
        """Admit the sequence after all its blocks were written; without a first token, sample it here."""

    def abort(self, reason: str) -> None:
        """Free the blocks, unless the sequence was admitted; called at most once."""


class BlockSink(Protocol):
    """The destination of received blocks: the decode worker."""

    layout: KvLayout
    epoch: str

    async def open(self, request: pb.PushOpen) -> Reservation:
        """Wait until the sequence is accepted and all blocks of the push are allocated; return them.

        Raises:
            TransferError: the ticket is unknown, used, or of another attempt.
        """


class KvTransferServicer(kvtransfer_pb2_grpc.KvTransferServiceServicer):
    """Serves pushes into one sink."""

    def __init__(
        self,
        sink: BlockSink,
        metrics: TransferMetrics,
        transports: Transports = MESSAGES_ONLY,
        *,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._sink = sink
        self._metrics = metrics
        self._transports = transports
        self._window_blocks = window_bytes // sink.layout.block_bytes

    async def Push(
        self,
        request_iterator: AsyncIterator[pb.PushRequest],
        context: grpc.aio.ServicerContext[pb.PushRequest, pb.PushResponse],
    ) -> AsyncIterator[pb.PushResponse]:
        """Receive one sequence's blocks, under flow control, and admit the sequence."""
        try:
            async with aclosing(self._receive(request_iterator)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.record_failure("push", SenderGoneError.reason)
            raise
        except Exception as error:
            # gRPC and this frame form cycles with the error. The frames of its traceback must not hold blocks
            # in the sender's memory until the garbage collector finds them.
            traceback.clear_frames(error.__traceback__)
            failure = _as_transfer_error(error)
            self._metrics.record_failure("push", failure.reason)
            refused = pb.PushRefused(status_code=failure.code.value[0], message=str(failure))
            yield pb.PushResponse(refused=refused)
            if failure is not error:
                raise  # An unexpected error is a defect, which the server logs.
            await context.abort(failure.code, str(failure))

    async def _receive(self, requests: AsyncIterator[pb.PushRequest]) -> AsyncGenerator[pb.PushResponse]:
        """Grant credit, write the blocks that arrive, and admit the sequence once it is complete."""
        opening = await self._accept(requests)
        intake = await self._transports.choose(opening.shared_pool)
        reservation = await self._sink.open(opening)
        try:
            first_block = reservation.first_block
            window = CreditWindow(first_block, opening.num_blocks, self._window_blocks)
            has_begun = False
            while True:
                if (credit := window.grant()) or not has_begun:
                    granted = pb.PushCredit(
                        num_blocks=credit, transport=intake.transport.on_wire, first_block=first_block
                    )
                    yield pb.PushResponse(credit=granted)
                    has_begun = True
                request = await _next(requests)
                if request.WhichOneof("message") == "commit":
                    break
                # Copying and digesting megabytes would block the event loop.
                await asyncio.get_running_loop().run_in_executor(
                    intake.executor, self._write, request, window, intake, reservation
                )
            if window.num_missing:
                raise ProtocolError(
                    f"{window.num_missing} of {opening.num_blocks} blocks were missing at commit"
                )
            commit = request.commit
            await reservation.commit(commit.first_token_id if commit.HasField("first_token_id") else None)
        except BaseException as error:
            reservation.abort(str(_as_transfer_error(error)))
            raise
        committed = pb.PushCommitted(num_held_blocks=reservation.num_held_blocks)
        yield pb.PushResponse(committed=committed)

    async def _accept(self, requests: AsyncIterator[pb.PushRequest]) -> pb.PushOpen:
        request = await _next(requests)
        if request.WhichOneof("message") != "open":
            raise ProtocolError("a push begins with open")
        if request.open.receiver_epoch != self._sink.epoch:
            raise StaleEpochError("the receiver has restarted since the ticket was issued")
        require_equal(self._sink.layout, layout_from_proto(request.open.layout))
        return request.open

    def _write(
        self, request: pb.PushRequest, window: CreditWindow, intake: Intake, reservation: Reservation
    ) -> None:
        if request.WhichOneof("message") != "frames":
            raise ProtocolError("open must be followed by frames and one commit")
        for frame in intake.frames(request.frames.frames, *self._sink.layout.payload_sizes):
            if window.take(frame.index):
                reservation.write(frame)
                self._metrics.record_received(len(frame.payload), intake.transport)


async def _next(requests: AsyncIterator[pb.PushRequest]) -> pb.PushRequest:
    request = await anext(requests, None)
    if request is None:
        raise SenderGoneError("the sender went away before it committed")
    return request


def _as_transfer_error(error: BaseException) -> TransferError:
    """Return the TransferError for a push that ended without a commit; only the sender cancels the call."""
    if isinstance(error, TransferError):
        return error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return SenderGoneError("the sender went away before it committed")
    return TransferError(f"the receiver failed: {error!r}")
