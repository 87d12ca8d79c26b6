"""The server of pulls: the size of its messages, what it counts, and the statuses of its errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import NoBlocksError, TransferError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.leases import LEASE_SECONDS, BlockLeases
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.pull_server import KvPullServicer
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from tests.testing.rpc_errors import error_of

LAYOUT = KvLayout(1, 1, 4, 8, "float16", "model", "float16", "float32-1")
NUM_BLOCKS = 5
HASHES = [bytes([index]) * 16 for index in range(NUM_BLOCKS)]


class Pool:
    """Blocks whose bytes are their ids, from 10."""

    layout = LAYOUT
    epoch = "epoch"

    def __init__(self) -> None:
        self.error: TransferError | None = None
        self.on_read: Callable[[], None] = lambda: None

    async def pin(self, lease_id: str, block_hashes: Sequence[bytes]) -> Sequence[int]:
        if self.error is not None:
            raise self.error
        return range(10, 10 + len(block_hashes))

    def unpin(self, lease_id: str) -> None:
        pass

    def frame(self, index: int, block_hash: bytes, block_id: int, *, is_bare: bool = False) -> Frame:
        self.on_read()
        return Frame(index, block_hash, bytes([block_id]) * LAYOUT.block_bytes)


class Setup:
    """A running server of pulls, and its client."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.pool, self.registry = Pool(), CollectorRegistry()
        metrics = TransferMetrics(self.registry)
        self.leases = BlockLeases(self.pool, metrics, max_blocks=NUM_BLOCKS)
        servicer = KvPullServicer(self.leases, metrics)
        kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server(servicer, server)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        self.stub: Any = kvtransfer_pb2_grpc.KvPullServiceStub(self.channel)

    async def pin(self) -> pb.PinResponse:
        request = pb.PinRequest(holder_epoch="epoch", layout=layout_to_proto(LAYOUT), block_hashes=HASHES)
        response: pb.PinResponse = await self.stub.Pin(request)
        return response

    async def pull(self, lease_id: str, first_block: int, num_blocks: int) -> list[pb.PullResponse]:
        request = pb.PullRequest(
            lease_id=lease_id, first_block=first_block, num_blocks=num_blocks, transport=pb.TRANSPORT_MESSAGES
        )
        return [message async for message in self.stub.Pull(request)]

    def num_lent(self) -> tuple[float | None, float | None]:
        """Return how many blocks and bytes the metrics say were lent."""
        blocks, size = (
            self.registry.get_sample_value(f"quire_kv_transfer_{unit}_total", {"direction": "lent"} | labels)
            for unit, labels in (("blocks", {}), ("bytes", {"transport": "messages"}))
        )
        return blocks, size


@pytest.fixture
async def setup(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr(frames, "MESSAGE_BYTES", 2 * LAYOUT.block_bytes)
    server = grpc.aio.server()
    running = Setup(server)
    await server.start()
    yield running
    await running.channel.close(None)
    await server.stop(None)


async def test_messages_are_filled_up_to_their_size(setup: Setup) -> None:
    pinned = await setup.pin()
    messages = await setup.pull(pinned.lease_id, 0, NUM_BLOCKS)
    assert [[frame.index for frame in message.frames] for message in messages] == [[0, 1], [2, 3], [4]]
    sent = [frames.from_proto(frame) for message in messages for frame in message.frames]
    assert [frame.block_hash for frame in sent] == HASHES
    assert [frame.payload[0] for frame in sent] == [10, 11, 12, 13, 14]
    assert setup.num_lent() == (NUM_BLOCKS, NUM_BLOCKS * LAYOUT.block_bytes)


async def test_no_blocks_are_no_messages(setup: Setup) -> None:
    pinned = await setup.pin()
    assert await setup.pull(pinned.lease_id, NUM_BLOCKS, 0) == []


async def test_a_lease_that_ends_during_a_copy_is_not_counted_as_lent(setup: Setup) -> None:
    pinned = await setup.pin()
    reads: list[None] = []

    def release_at_the_third() -> None:
        reads.append(None)
        if len(reads) == 3:
            setup.leases.find(pinned.lease_id).is_closed = True

    setup.pool.on_read = release_at_the_third
    with pytest.raises(grpc.aio.AioRpcError, match="while its blocks were copied") as ended:
        await setup.pull(pinned.lease_id, 0, NUM_BLOCKS)
    assert ended.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(reads) == 4, "the second message was copied whole, and then withheld"
    assert setup.num_lent()[0] == 2


@pytest.mark.parametrize(("first_block", "num_blocks"), [(0, 6), (5, 1), (4, 2)])
async def test_blocks_that_are_not_pinned_are_not_read(
    setup: Setup, first_block: int, num_blocks: int
) -> None:
    setup.pool.on_read = lambda: pytest.fail("a block was read")
    pinned = await setup.pin()
    with pytest.raises(grpc.aio.AioRpcError, match="5 blocks are pinned") as refused:
        await setup.pull(pinned.lease_id, first_block, num_blocks)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_pools_error_reaches_the_puller_with_its_status(setup: Setup) -> None:
    setup.pool.error = NoBlocksError("the worker stops")
    await error_of(setup.pin(), NoBlocksError.code, "the worker stops")


async def test_another_layout_is_refused(setup: Setup) -> None:
    layout = layout_to_proto(replace(LAYOUT, head_dim=16))
    with pytest.raises(grpc.aio.AioRpcError, match="head_dim is 8 here and 16 there") as refused:
        await setup.stub.Pin(pb.PinRequest(holder_epoch="epoch", layout=layout, block_hashes=HASHES))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_renewed_lease_has_its_whole_time_again(setup: Setup) -> None:
    pinned = await setup.pin()
    assert pinned.expires_in_ms == LEASE_SECONDS * 1000
    lease = setup.leases.find(pinned.lease_id)
    lease.expires_at -= LEASE_SECONDS / 2
    before = time.monotonic()
    await setup.stub.Renew(pb.RenewRequest(lease_id=pinned.lease_id))
    assert lease.expires_at >= before + LEASE_SECONDS


async def test_an_unknown_lease_is_not_found(setup: Setup) -> None:
    for call in (
        setup.stub.Renew(pb.RenewRequest(lease_id="none")),
        setup.stub.Pull(pb.PullRequest(lease_id="none", num_blocks=1)).read(),
    ):
        await error_of(call, grpc.StatusCode.NOT_FOUND)
