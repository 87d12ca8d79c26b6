"""The server of pulls: pins blocks and sends copies of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from itertools import islice

import grpc

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import ProtocolError, StaleEpochError, TransferError, UnknownLeaseError
from quire.kvtransfer.frame import Frame, Transport
from quire.kvtransfer.layout import layout_from_proto, require_equal
from quire.kvtransfer.leases import LEASE_SECONDS, BlockLeases, Lease
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.transports.interface import Transports, agreed
from quire.kvtransfer.transports.messages import MESSAGES_ONLY
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc


class KvPullServicer(kvtransfer_pb2_grpc.KvPullServiceServicer):
    """Lets other workers pin and pull one worker's blocks."""

    def __init__(
        self, leases: BlockLeases, metrics: TransferMetrics, transports: Transports = MESSAGES_ONLY
    ) -> None:
        self._leases = leases
        self._source = leases.source
        self._metrics = metrics
        self._transports = transports

    async def Pin(
        self, request: pb.PinRequest, context: grpc.aio.ServicerContext[pb.PinRequest, pb.PinResponse]
    ) -> pb.PinResponse:
        """Pin the leading blocks that are present, under a new lease."""
        try:
            if request.holder_epoch != self._source.epoch:
                raise StaleEpochError("the holder has restarted: its blocks of before are gone")
            require_equal(self._source.layout, layout_from_proto(request.layout))
            lease = await self._leases.pin(request.block_hashes)
        except TransferError as error:
            await context.abort(error.code, str(error))
        if lease is None:
            return pb.PinResponse()
        return pb.PinResponse(
            lease_id=lease.lease_id,
            num_blocks=len(lease.block_ids),
            expires_in_ms=int(LEASE_SECONDS * 1000),
            shared_pool=self._transports.offer,
        )

    async def Pull(
        self, request: pb.PullRequest, context: grpc.aio.ServicerContext[pb.PullRequest, pb.PullResponse]
    ) -> AsyncIterator[pb.PullResponse]:
        """Send copies of pinned blocks, no faster than the puller reads them."""
        try:
            async with aclosing(self._copies(request)) as messages:
                async for message in messages:
                    yield message
        except TransferError as error:
            await context.abort(error.code, str(error))

    async def Renew(
        self, request: pb.RenewRequest, context: grpc.aio.ServicerContext[pb.RenewRequest, pb.RenewResponse]
    ) -> pb.RenewResponse:
        """Extend a lease to its full time from now."""
        try:
            self._leases.renew(request.lease_id)
        except TransferError as error:
            await context.abort(error.code, str(error))
        return pb.RenewResponse()

    async def Release(
        self,
        request: pb.ReleaseRequest,
        context: grpc.aio.ServicerContext[pb.ReleaseRequest, pb.ReleaseResponse],
    ) -> pb.ReleaseResponse:
        """End a lease and unpin its blocks."""
        self._leases.release(request.lease_id)
        return pb.ReleaseResponse()

    async def _copies(self, request: pb.PullRequest) -> AsyncGenerator[pb.PullResponse]:
        lease = self._leases.find(request.lease_id)
        end = request.first_block + request.num_blocks
        if end > len(lease.block_ids):
            raise ProtocolError(f"{len(lease.block_ids)} blocks are pinned, block {end - 1} was asked for")
        transport = agreed(self._transports, request.transport)
        block_bytes = self._source.layout.block_bytes
        num_per_message = frames.blocks_per_message(block_bytes, transport)
        pending = self._frames(lease, range(request.first_block, end), transport)
        while True:
            message = pb.PullResponse()
            chosen = islice(pending, num_per_message)
            await asyncio.to_thread(frames.add_to, message.frames, chosen, transport)
            if not message.frames:
                return
            # A copy or digest is valid only if its block was pinned all the time. After the end of the lease,
            # the block may have been overwritten.
            if lease.is_closed:
                raise UnknownLeaseError("the lease ended while its blocks were copied: pin them again")
            num_blocks = frames.num_completed(message.frames)
            self._metrics.record_lent(num_blocks, num_blocks * block_bytes, transport)
            yield message

    def _frames(self, lease: Lease, indices: range, transport: Transport) -> Iterator[Frame]:
        """Yield pinned blocks, or their pieces."""
        num_bare = self._source.layout.num_bare(len(lease.block_ids))
        for i in indices:
            frame = self._source.frame(i, lease.block_hashes[i], lease.block_ids[i], is_bare=i < num_bare)
            yield from frame.pieces(transport)
