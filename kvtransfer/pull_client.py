"""The client of a pull: copies blocks that another worker holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, Self

import grpc.aio

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import DigestMismatchError, ProtocolError, PullFailedError
from quire.kvtransfer.frame import Frame, Transport
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.transports.interface import Intake, Transports
from quire.kvtransfer.transports.messages import MESSAGES_ONLY, Messages
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool

RELEASE_SECONDS = 0.5
"""Time limit of the call that releases a lease. If it fails, the lease expires by itself."""


class Holder(NamedTuple):
    """A worker that holds blocks: its address (host:port), and the epoch of its current start."""

    address: str
    epoch: str


class BlockPull:
    """One pull, as an async context manager: entering pins the blocks, and leaving releases them.

    ::

        async with BlockPull(channels, holder, block_hashes=hashes, ...) as pull:
            async for frames in pull.frames():    # the first pull.num_blocks of the hashes, in order
                ...                               # copy each payload, then frame.check_copy(the copy)
    """

    def __init__(
        self,
        channels: ChannelPool,
        holder: Holder,
        *,
        layout: KvLayout,
        block_hashes: Sequence[bytes],
        timeout: float,
        transports: Transports = MESSAGES_ONLY,
    ) -> None:
        self._channels = channels
        self._transports = transports
        self._intake: Intake = Messages()
        self._holder = holder
        self._block_hashes = block_hashes
        self._payload_sizes = layout.payload_sizes
        self._timeout = timeout
        self._pin = pb.PinRequest(
            holder_epoch=holder.epoch,
            layout=layout_to_proto(layout),
            block_hashes=block_hashes,
        )
        self._lease_id = ""
        self._renewing: asyncio.Task[None] | None = None
        self.num_blocks = 0
        """Number of leading blocks that are pinned; set when the context is entered."""

    async def __aenter__(self) -> Self:
        """Pin the leading blocks that the holder still has.

        Raises:
            PullFailedError: the holder refused, has restarted, vanished or ran out of time.
            NotSharedError: the holder's pool cannot be reached, and no other transport is allowed.
        """
        with ExitStack() as undo:
            self._peer = undo.enter_context(self._channels.peer(*self._holder))
            self._stub = kvtransfer_pb2_grpc.KvPullServiceStub(self._peer)
            with _call_errors():
                call = self._stub.Pin(self._pin, timeout=self._timeout)
                await self._peer.check(call)
                pinned = await call
            self._in_use = undo.pop_all()
        if pinned.num_blocks:
            self._lease_id = pinned.lease_id
            self.num_blocks = min(pinned.num_blocks, len(self._block_hashes))
            self._renewing = asyncio.create_task(self._renew(pinned.expires_in_ms / 3000))
            try:
                self._intake = await self._transports.choose(pinned.shared_pool)
            except BaseException:
                await self.__aexit__()
                raise
        return self

    @property
    def transport(self) -> Transport:
        """How the blocks are transferred; known when the context is entered."""
        return self._intake.transport

    async def __aexit__(self, *exception: object) -> None:
        with self._in_use:
            if self._renewing is None:
                return
            self._renewing.cancel()
            with suppress(grpc.aio.AioRpcError):
                await self._stub.Release(pb.ReleaseRequest(lease_id=self._lease_id), timeout=RELEASE_SECONDS)

    async def frames(self, first_block: int = 0) -> AsyncGenerator[list[Frame]]:
        """Yield the pinned blocks from ``first_block`` on, one list for each message.

        They do not change while the context is open. Before a copy of a payload is used, ``Frame.check_copy``
        must accept it.

        Raises:
            DigestMismatchError: a block is not the requested one, or its bytes changed on the way.
            ProtocolError: blocks arrived out of order, or some did not arrive.
            PullFailedError: the lease has ended, or the holder vanished or ran out of time.
        """
        due = first_block
        call = self._stub.Pull(
            pb.PullRequest(
                lease_id=self._lease_id,
                first_block=due,
                num_blocks=self.num_blocks - first_block,
                transport=self.transport.on_wire,
            ),
            timeout=self._timeout,
        )
        try:
            with _call_errors():
                await self._peer.check(call)
            while (message := await _read(call)) is not None:
                # Checking the digest of megabytes would block the event loop.
                checked = await asyncio.get_running_loop().run_in_executor(
                    self._intake.executor, self._check, message, due
                )
                due += len(checked)
                yield checked
            if due < self.num_blocks:
                raise ProtocolError(f"{self.num_blocks - due} of {self.num_blocks} blocks did not arrive")
        finally:
            call.cancel()

    def _check(self, message: pb.PullResponse, due: int) -> list[Frame]:
        checked = []
        for frame in self._intake.frames(message.frames, *self._payload_sizes):
            if frame.index != due or due >= self.num_blocks:
                raise ProtocolError(f"block {frame.index} arrived when block {due} was due")
            if frame.block_hash != self._block_hashes[due]:
                raise DigestMismatchError(f"block {due} is not the block that was asked for")
            checked.append(frame)
            due += 1
        return checked

    async def _renew(self, interval: float) -> None:
        """Renew the lease while the pull lasts. If renewal fails, the pull's own call reports the error."""
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
