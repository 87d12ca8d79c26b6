"""The sending end: pushes one sequence's blocks to a decode worker while later ones are still computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

import grpc
import grpc.aio

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import ProtocolError, PushFailedError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import KvLayout
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class PushSummary(NamedTuple):
    """What a push moved and where its time went.

    Attributes:
        num_saved_bytes: bytes of the blocks that the receiver had already.
        seconds: from open to the receiver's acknowledgement.
        credit_wait_seconds: part of it in which blocks were ready and there was no credit.
        send_seconds: part of it in which a message was being handed to the network.
    """

    num_blocks: int
    num_bytes: int
    num_saved_bytes: int
    seconds: float
    credit_wait_seconds: float
    send_seconds: float


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
        self._blocks_per_message = frames.blocks_per_message(layout.block_bytes)
        self._open = pb.PushOpen(
            ticket_id=ticket.ticket_id,
            receiver_epoch=ticket.receiver_epoch,
            request_id=request_id,
            attempt=attempt,
            layout=layout.to_proto(),
            first_block=ticket.first_block,
            num_blocks=num_blocks,
        )
        self._responses: asyncio.Queue[pb.PushResponse | None] = asyncio.Queue()
        self._refused: pb.PushRefused | None = None
        self._num_left = num_blocks - ticket.first_block
        self._num_sent = 0
        self._credit = 0
        self._credit_wait_seconds = 0.0
        self._waiting_since: float | None = None
        self._send_seconds = 0.0

    async def __aenter__(self) -> Self:
        self._start = perf_counter()
        self._call = self._stub.Push(timeout=self._timeout)
        self._reading = asyncio.create_task(self._read_responses())
        self._writing = self._start_write(pb.PushRequest(open=self._open))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A call that has ended ignores this; one that has not is taken back at the receiver.
        self._call.cancel()
        self._reading.cancel()
        self._writing.cancel()
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)

    async def send(self, blocks: Iterable[Frame]) -> None:
        """Send blocks in order; return when the last message is on its way, within the credit.

        ``blocks`` may be lazy: it is read in a thread, no further ahead of the credit than one block.

        Raises:
            ProtocolError: there are more blocks than the push was opened for.
            PushFailedError: the receiver refused, vanished or ran out of time.
        """
        pending = iter(blocks)
        while True:
            count = min(self._blocks_per_message, max(1, self._credit))
            # Copying and digesting megabytes would hold up the event loop; meanwhile the last message leaves.
            message = await asyncio.to_thread(frames.to_proto, islice(pending, count))
            num_blocks = len(message.frames.frames)
            if not num_blocks:
                return
            if num_blocks > self._num_left:
                raise ProtocolError(f"more blocks than the {self._open.num_blocks} of the push")
            await self._wait_for_credit()
            await self._writing
            self._writing = self._start_write(message)
            self._credit -= num_blocks
            self._num_left -= num_blocks
            self._num_sent += num_blocks

    async def commit(self, first_token_id: int | None) -> PushSummary:
        """End the push and wait until the receiver has admitted the sequence.

        Raises:
            PushFailedError: the receiver refused, vanished or ran out of time.
        """
        await self._writing
        await self._write(pb.PushRequest(commit=pb.PushCommit(first_token_id=first_token_id)))
        while (await self._response()).WhichOneof("message") != "committed":
            pass
        # Let the receiver end the call; to cancel it now would show there as an error.
        await self._reading
        return PushSummary(
            num_blocks=self._num_sent,
            num_bytes=self._num_sent * self._block_bytes,
            num_saved_bytes=self._open.first_block * self._block_bytes,
            seconds=perf_counter() - self._start,
            credit_wait_seconds=self._credit_wait_seconds,
            send_seconds=self._send_seconds,
        )

    @property
    def credit_wait_seconds(self) -> float:
        """How long blocks have been ready without credit until now."""
        waiting = perf_counter() - self._waiting_since if self._waiting_since is not None else 0.0
        return self._credit_wait_seconds + waiting

    async def _wait_for_credit(self) -> None:
        self._waiting_since = perf_counter()
        while not self._credit:
            self._credit += (await self._response()).credit.num_blocks
        self._credit_wait_seconds, self._waiting_since = self.credit_wait_seconds, None

    def _start_write(self, message: pb.PushRequest) -> asyncio.Task[None]:
        return asyncio.create_task(self._write(message))

    async def _write(self, message: pb.PushRequest) -> None:
        start = perf_counter()
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # A stream that the receiver has ended refuses writes; its status says why it did.
            raise await self._failure() from error
        self._send_seconds += perf_counter() - start

    async def _read_responses(self) -> None:
        """Queue what the receiver says, and at its end None.

        It must be read all the time: a call has no status before every message ahead of it was read, so a
        write that fails would wait for its error as long as a credit lies there.
        """
        with suppress(grpc.aio.AioRpcError):
            # Iteration reads to the end; ``read`` would stop at a failed write and miss the refusal.
            async for response in self._call:
                if response.WhichOneof("message") == "refused":
                    self._refused = response.refused
                self._responses.put_nowait(response)
        self._responses.put_nowait(None)

    async def _response(self) -> pb.PushResponse:
        response = await self._responses.get()
        if response is None or self._refused is not None:
            self._responses.put_nowait(None)  # for whoever asks again
            raise await self._failure()
        return response

    async def _failure(self) -> PushFailedError:
        await asyncio.wait([self._reading])
        if self._refused is not None:
            return PushFailedError(_STATUS_CODES[self._refused.status_code], self._refused.message)
        code, details = await self._call.code(), await self._call.details() or ""
        if code is grpc.StatusCode.INTERNAL:
            # A receiver that fails refuses first: this is gRPC's word for a stream that broke under a write.
            code = grpc.StatusCode.UNAVAILABLE
        return PushFailedError(code, details)
