"""The receiving end: checks every block before it is written, and admits a sequence only when it is whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

import grpc

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import ProtocolError, StaleEpochError, TransferError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import KvLayout, require_equal
from quire.kvtransfer.metrics import TransferMetrics
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc

CREDIT_BYTES = 64 << 20
"""Bytes of a push that may be on their way at once."""


class Reservation(Protocol):
    """Blocks that one push may fill."""

    def write(self, frame: Frame) -> None:
        """Write a checked block; raise TransferError if it is not the block that belongs there."""

    async def commit(self, first_token_id: int) -> None:
        """Admit the sequence: every block has been written."""

    def abort(self, reason: str) -> None:
        """Give the blocks back; idempotent, and nothing after a commit."""


class BlockSink(Protocol):
    """Where received blocks go: the decode worker."""

    layout: KvLayout
    epoch: str

    async def open(self, request: pb.PushOpen) -> Reservation:
        """Return a reservation for all blocks of the push, waiting until they can be allocated.

        Raises:
            TransferError: the ticket is unknown, used, or of another attempt.
        """


class KvTransferServicer(kvtransfer_pb2_grpc.KvTransferServiceServicer):
    """Serves pushes into one sink."""

    def __init__(self, sink: BlockSink, metrics: TransferMetrics) -> None:
        self._sink = sink
        self._metrics = metrics

    async def Push(
        self,
        request_iterator: AsyncIterator[pb.PushRequest],
        context: grpc.aio.ServicerContext[pb.PushRequest, pb.PushResponse],
    ) -> AsyncIterator[pb.PushResponse]:
        """Receive one sequence's blocks."""
        try:
            async with aclosing(self._receive(request_iterator)) as responses:
                async for response in responses:
                    yield response
        except TransferError as error:
            self._metrics.failures.labels(reason=type(error).__name__).inc()
            await context.abort(error.code, str(error))

    async def _receive(self, requests: AsyncIterator[pb.PushRequest]) -> AsyncGenerator[pb.PushResponse]:
        first = await anext(requests)
        if first.WhichOneof("message") != "open":
            raise ProtocolError("a push begins with open")
        opening = first.open
        if opening.receiver_epoch != self._sink.epoch:
            raise StaleEpochError("the receiver has restarted since the ticket was issued")
        require_equal(self._sink.layout, KvLayout.from_proto(opening.layout))
        reservation = await self._sink.open(opening)
        reason = "the sender went away before it committed"
        try:
            async with aclosing(self._fill(reservation, opening, requests)) as responses:
                async for response in responses:
                    yield response
        except TransferError as error:
            reason = str(error)
            raise
        finally:
            reservation.abort(reason)

    async def _fill(
        self, reservation: Reservation, opening: pb.PushOpen, requests: AsyncIterator[pb.PushRequest]
    ) -> AsyncGenerator[pb.PushResponse]:
        """Grant credit, write what comes, and admit the sequence when it is whole."""
        window = max(2, CREDIT_BYTES // self._sink.layout.block_bytes)
        expected, granted = opening.first_block, opening.first_block
        while True:
            if granted < opening.num_blocks and granted - expected <= window // 2:
                credit = min(window, opening.num_blocks - granted)
                granted += credit
                yield pb.PushResponse(credit=pb.PushCredit(num_blocks=credit))
            request = await anext(requests, None)
            if request is None:
                raise ProtocolError("the push ended without commit")
            if request.WhichOneof("message") == "commit":
                break
            for message in request.frames.frames:
                expected = self._write(reservation, message, expected, granted)
        if expected != opening.num_blocks:
            raise ProtocolError(f"{expected} of {opening.num_blocks} blocks had arrived at commit")
        await reservation.commit(request.commit.first_token_id)
        count = opening.num_blocks - opening.first_block
        yield pb.PushResponse(committed=pb.PushCommitted(num_blocks=count))

    def _write(self, reservation: Reservation, message: pb.BlockFrame, expected: int, granted: int) -> int:
        """Write one block and return the index of the next; a block that came before changes nothing."""
        if message.index < expected:
            return expected
        if message.index > expected or message.index >= granted:
            raise ProtocolError(f"block {message.index} came where block {expected} of {granted} was due")
        frame = frames.from_proto(message)
        reservation.write(frame)
        self._metrics.received_blocks.inc()
        self._metrics.received_bytes.inc(len(frame.payload))
        return expected + 1
