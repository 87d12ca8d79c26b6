"""Pins and pulls over a real server: what is lent and for how long, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import DigestMismatchError, ProtocolError, PullFailedError, UnknownLeaseError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.leases import LEASE_SECONDS, BlockLeases
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.pull_client import BlockPull
from quire.kvtransfer.pull_client import Holder as Remote
from quire.kvtransfer.pull_server import KvPullServicer
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool
from tests.testing.manual_clock import ManualClock

WAIT_SECONDS = 10.0
# One block is 2 MiB: each is a message of its own.
LAYOUT = KvLayout(8, 8, 128, 64, "float16", "model-a", "float16", "cpu")
EPOCH = "epoch-1"
NUM_BLOCKS = 6
MAX_LENT = 8


def name_of(index: int) -> bytes:
    return b"hash" + index.to_bytes(12, "little")


def hashes(count: int) -> list[bytes]:
    return [name_of(index) for index in range(count)]


def payload_of(index: int) -> bytes:
    return bytes([index]) * LAYOUT.block_bytes


class Blocks:
    """Blocks of known content, and who holds them."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.epoch = EPOCH
        self.present = {name_of(index): index for index in range(NUM_BLOCKS)}
        self.pins: dict[str, Sequence[int]] = {}
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()

    async def pin(self, lease_id: str, block_hashes: Sequence[bytes]) -> Sequence[int]:
        block_ids: list[int] = []
        for block_hash in block_hashes:
            if block_hash not in self.present:
                break
            block_ids.append(self.present[block_hash])
        if block_ids:
            self.pins[lease_id] = block_ids
        return block_ids

    def unpin(self, lease_id: str) -> None:
        self.pins.pop(lease_id, None)

    def frame(self, index: int, block_hash: bytes, block_id: int) -> Frame:
        self.is_reading.set()
        self.may_read.wait(WAIT_SECONDS)
        return Frame(index, block_hash, payload_of(block_id))


@dataclass
class Holder:
    """A running holder, and how to pull from it."""

    server: grpc.aio.Server
    address: str
    source: Blocks
    leases: BlockLeases
    clock: ManualClock
    registry: CollectorRegistry
    channels: ChannelPool = field(default_factory=ChannelPool)

    @property
    def stub(self) -> Any:
        with self.channels.peer(self.address, EPOCH) as peer:
            return kvtransfer_pb2_grpc.KvPullServiceStub(peer)

    def pull(self, count: int = NUM_BLOCKS, **changes: Any) -> BlockPull:
        """Return a pull that is right but for the changes."""
        arguments: dict[str, Any] = {
            "attempt_id": "r",
            "layout": LAYOUT,
            "block_hashes": hashes(count),
            "timeout": WAIT_SECONDS,
        }
        holder = Remote(changes.pop("address", self.address), changes.pop("epoch", EPOCH))
        return BlockPull(self.channels, holder, **(arguments | changes))

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"quire_kv_{name}", labels) or 0.0


@pytest.fixture
async def holder() -> AsyncIterator[Holder]:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", 16 << 20)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    source, clock, registry = Blocks(), ManualClock(), CollectorRegistry()
    metrics = TransferMetrics(registry)
    leases = BlockLeases(source, metrics, max_blocks=MAX_LENT, clock=clock)
    kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server(KvPullServicer(leases, metrics), server)
    await server.start()
    running = Holder(server, address, source, leases, clock, registry)
    try:
        yield running
    finally:
        source.may_read.set()
        await running.channels.close()
        await server.stop(None)


async def all_frames(pull: BlockPull, first_block: int = 0) -> list[Frame]:
    return [frame async for frames in pull.frames(first_block) for frame in frames]


async def test_pinned_blocks_arrive_and_are_released(holder: Holder) -> None:
    async with holder.pull() as pull:
        assert [list(ids) for ids in holder.source.pins.values()] == [list(range(NUM_BLOCKS))]
        frames = await all_frames(pull)
    assert frames == [Frame(index, name_of(index), payload_of(index)) for index in range(NUM_BLOCKS)]
    assert holder.source.pins == {}
    assert holder.sample("transfer_blocks_total", direction="lent") == NUM_BLOCKS
    assert holder.sample("leases") == 0


async def test_a_range_of_them(holder: Holder) -> None:
    async with holder.pull() as pull:
        assert [frame.index for frame in await all_frames(pull, first_block=4)] == [4, 5]


async def test_only_the_leading_blocks_that_are_there_are_pinned(holder: Holder) -> None:
    del holder.source.present[name_of(3)]
    async with holder.pull() as pull:
        assert pull.num_blocks == 3
        assert len(await all_frames(pull)) == 3


async def test_nothing_there_is_no_lease(holder: Holder) -> None:
    holder.source.present.clear()
    async with holder.pull() as pull:
        assert pull.num_blocks == 0
    assert holder.sample("leases") == 0


async def test_no_more_is_lent_than_allowed(holder: Holder) -> None:
    async with holder.pull() as first, holder.pull() as second:
        assert (first.num_blocks, second.num_blocks) == (NUM_BLOCKS, MAX_LENT - NUM_BLOCKS)
        async with holder.pull() as third:
            assert third.num_blocks == 0
    async with holder.pull() as again:
        assert again.num_blocks == NUM_BLOCKS


async def test_a_stale_epoch_pins_nothing(holder: Holder) -> None:
    with pytest.raises(PullFailedError, match="restarted") as refused:
        async with holder.pull(epoch="epoch-0"):
            pass
    assert refused.value.status is grpc.StatusCode.ABORTED
    assert holder.source.pins == {}


async def test_another_layout_is_refused(holder: Holder) -> None:
    with pytest.raises(PullFailedError, match="head_dim is 64 here and 32 there"):
        async with holder.pull(layout=replace(LAYOUT, head_dim=32)):
            pass


async def test_a_lease_ends_by_itself(holder: Holder) -> None:
    lease = await holder.leases.pin(hashes(2))
    assert lease is not None
    holder.clock.now += LEASE_SECONDS - 0.1
    holder.leases.sweep()
    assert holder.source.pins
    holder.clock.now += 0.1
    holder.leases.sweep()
    assert holder.source.pins == {}
    assert lease.is_closed
    assert holder.sample("leases_expired_total") == 1
    with pytest.raises(UnknownLeaseError):
        holder.leases.find(lease.lease_id)


async def test_a_lease_that_has_run_out_is_not_found_even_before_the_sweep(holder: Holder) -> None:
    pinned = await holder.stub.Pin(
        pb.PinRequest(holder_epoch=EPOCH, layout=layout_to_proto(LAYOUT), block_hashes=hashes(2))
    )
    holder.clock.now += pinned.expires_in_ms / 1000
    with pytest.raises(grpc.aio.AioRpcError, match="pin the blocks again"):
        await holder.stub.Pull(pb.PullRequest(lease_id=pinned.lease_id, num_blocks=2)).read()


async def test_renewing_keeps_a_lease(holder: Holder) -> None:
    lease = await holder.leases.pin(hashes(2))
    assert lease is not None
    for _ in range(3):
        holder.clock.now += LEASE_SECONDS * 0.9
        renewed = await holder.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id))
        assert renewed.expires_in_ms == LEASE_SECONDS * 1000
    assert holder.source.pins


async def test_release_is_idempotent(holder: Holder) -> None:
    lease = await holder.leases.pin(hashes(2))
    assert lease is not None
    for _ in range(3):
        await holder.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))
    await holder.stub.Release(pb.ReleaseRequest(lease_id="never given"))
    assert holder.source.pins == {}
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await holder.stub.Renew(pb.RenewRequest(lease_id=lease.lease_id))
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_lease_that_ends_while_a_block_is_copied_sends_nothing_of_it(holder: Holder) -> None:
    holder.source.may_read.clear()
    async with holder.pull() as pull:
        pulling = asyncio.create_task(all_frames(pull))
        await asyncio.to_thread(holder.source.is_reading.wait, WAIT_SECONDS)
        holder.clock.now += LEASE_SECONDS
        holder.leases.sweep()
        holder.source.may_read.set()
        with pytest.raises(PullFailedError, match="while its blocks were copied"):
            await pulling


async def test_the_holders_end_ends_the_pull(holder: Holder) -> None:
    async with holder.pull() as pull:
        frames = pull.frames()
        await anext(frames)
        holder.source.may_read.clear()
        await holder.server.stop(None)
        with pytest.raises(PullFailedError):
            async for _ in frames:
                pass


async def test_more_than_is_pinned_is_refused(holder: Holder) -> None:
    async with holder.pull(2) as pull:
        pull.num_blocks = 3
        with pytest.raises(PullFailedError, match="2 blocks are pinned"):
            await all_frames(pull)


async def test_a_holder_that_takes_too_long_is_given_up(holder: Holder) -> None:
    holder.source.may_read.clear()
    async with holder.pull(timeout=0.2) as pull:
        with pytest.raises(PullFailedError) as late:
            await all_frames(pull)
    assert late.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_borrower_that_vanishes_holds_nothing_after_the_lease(holder: Holder) -> None:
    await holder.stub.Pin(
        pb.PinRequest(holder_epoch=EPOCH, layout=layout_to_proto(LAYOUT), block_hashes=hashes(2))
    )
    await holder.channels.close()
    assert holder.source.pins
    holder.clock.now += LEASE_SECONDS
    holder.leases.sweep()
    assert holder.source.pins == {}


class Liar(KvPullServicer):
    """Sends what it should not."""

    def __init__(self, leases: BlockLeases, change: Any) -> None:
        super().__init__(leases, TransferMetrics(CollectorRegistry()))
        self._change = change

    async def Pull(self, request: Any, context: Any) -> AsyncIterator[pb.PullResponse]:
        async for message in super().Pull(request, context):
            self._change(message.frames[0])
            yield message


def flip_a_bit(frame: pb.BlockFrame) -> None:
    frame.payload = bytes([frame.payload[0] ^ 1]) + frame.payload[1:]


def take_anothers_name(frame: pb.BlockFrame) -> None:
    frame.block_hash = name_of(77)


def move(frame: pb.BlockFrame) -> None:
    frame.index += 1


@pytest.mark.parametrize(
    ("change", "error"),
    [(flip_a_bit, DigestMismatchError), (take_anothers_name, DigestMismatchError), (move, ProtocolError)],
)
async def test_a_wrong_block_is_found(holder: Holder, change: Any, error: type[Exception]) -> None:
    server = grpc.aio.server(options=[("grpc.max_send_message_length", 16 << 20)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server(Liar(holder.leases, change), server)
    await server.start()
    pull = replace(holder, address=address).pull()
    async with pull:
        with pytest.raises(error):
            await all_frames(pull)
    assert holder.source.pins == {}
    await server.stop(None)
