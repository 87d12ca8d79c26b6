"""The borrowing end of a pull: copies blocks that another worker holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import DigestMismatchError, ProtocolError, PullFailedError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import KvLayout
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc

RELEASE_SECONDS = 0.5
"""A holder that takes longer to hear of a release is left to the lease's expiry."""


class BlockPull:
    """One pull, as an async context manager: entering pins the blocks, leaving releases them.

    ::

        async with BlockPull(channel, block_hashes=hashes, ...) as pull:
            async for frames in pull.frames():    # the first pull.num_blocks of the hashes, checked, in order
                ...
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        request_id: str,
        holder_epoch: str,
        layout: KvLayout,
        block_hashes: Sequence[bytes],
        timeout: float,
    ) -> None:
        self._stub = kvtransfer_pb2_grpc.KvPullServiceStub(channel)
        self._block_hashes = block_hashes
        self._block_bytes = layout.block_bytes
        self._timeout = timeout
        self._pin = pb.PinRequest(
            request_id=request_id,
            holder_epoch=holder_epoch,
            layout=layout.to_proto(),
            block_hashes=block_hashes,
        )
        self._lease_id = ""
        self._renewing: asyncio.Task[None] | None = None
        self.num_blocks = 0
        """Leading blocks that are pinned; known once the pull was entered."""

    async def __aenter__(self) -> Self:
        """Pin.

        Raises:
            PullFailedError: the holder refused, has restarted, vanished or ran out of time.
        """
        with _call_errors():
            pinned = await self._stub.Pin(self._pin, timeout=self._timeout)
        if pinned.num_blocks:
            self._lease_id = pinned.lease_id
            self.num_blocks = min(pinned.num_blocks, len(self._block_hashes))
            self._renewing = asyncio.create_task(self._renew(pinned.expires_in_ms / 3000))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._renewing is None:
            return
        self._renewing.cancel()
        with suppress(grpc.aio.AioRpcError):
            await self._stub.Release(pb.ReleaseRequest(lease_id=self._lease_id), timeout=RELEASE_SECONDS)

    async def frames(self, first_block: int = 0) -> AsyncGenerator[list[Frame]]:
        """Yield the pinned blocks from ``first_block`` on, message by message, each block checked.

        Raises:
            DigestMismatchError: a block is not the one that was asked for, or its bytes changed on the way.
            ProtocolError: blocks came out of order, or not all.
            PullFailedError: the lease has ended, or the holder vanished or ran out of time.
        """
        due = first_block
        call = self._stub.Pull(
            pb.PullRequest(
                lease_id=self._lease_id, first_block=due, num_blocks=self.num_blocks - first_block
            ),
            timeout=self._timeout,
        )
        try:
            while (message := await _read(call)) is not None:
                # Digesting megabytes would hold up the event loop.
                checked = await asyncio.to_thread(self._check, message, due)
                due += len(checked)
                yield checked
            if due < self.num_blocks:
                raise ProtocolError(f"{self.num_blocks - due} of {self.num_blocks} blocks did not come")
        finally:
            call.cancel()

    def _check(self, message: pb.PullResponse, due: int) -> list[Frame]:
        checked = []
        for frame in map(frames.from_proto, message.frames):
            if frame.index != due or due >= self.num_blocks:
                raise ProtocolError(f"block {frame.index} came where block {due} was due")
            if frame.block_hash != self._block_hashes[due]:
                raise DigestMismatchError(f"block {due} is not the block that was asked for")
            if len(frame.payload) != self._block_bytes:
                raise ProtocolError(f"block {due} has {len(frame.payload)} bytes, not {self._block_bytes}")
            checked.append(frame)
            due += 1
        return checked

    async def _renew(self, interval: float) -> None:
        """Keep the lease while the pull lasts; without it the pull's own call says what is wrong."""
        with suppress(grpc.aio.AioRpcError):
            while True:
                await asyncio.sleep(interval)
                await self._stub.Renew(pb.RenewRequest(lease_id=self._lease_id), timeout=interval)


async def _read(call: grpc.aio.UnaryStreamCall[pb.PullRequest, pb.PullResponse]) -> pb.PullResponse | None:
    with _call_errors():
        message = await call.read()
    return message if isinstance(message, pb.PullResponse) else None


@contextmanager
def _call_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise PullFailedError(error.code(), error.details() or "") from error
