"""Leases on blocks: how many there may be, when they end, and what an error leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer import leases as leases_module
from quire.kvtransfer.errors import NoBlocksError, UnknownLeaseError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.leases import LEASE_SECONDS, BlockLeases, Lease
from quire.kvtransfer.metrics import TransferMetrics

LAYOUT = KvLayout(1, 1, 4, 8, "float16", "model", "float16", "float32-1")
MAX_BLOCKS = 10


def hashes(count: int) -> list[bytes]:
    return [bytes([index]) * 16 for index in range(count)]


class Pool:
    """A source whose first ``num_present`` blocks are present."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.epoch = "epoch"
        self.num_present = 8
        self.pins: dict[str, int] = {}
        self.pinning: asyncio.Future[None] | None = None
        self.is_unpinned = asyncio.Event()

    async def pin(self, lease_id: str, block_hashes: Sequence[bytes]) -> Sequence[int]:
        if self.pinning is not None:
            await self.pinning
        block_ids = list(range(min(len(block_hashes), self.num_present)))
        if block_ids:
            self.pins[lease_id] = len(block_ids)
        return block_ids

    def unpin(self, lease_id: str) -> None:
        self.pins.pop(lease_id, None)
        self.is_unpinned.set()

    def frame(self, index: int, block_hash: bytes, block_id: int, *, is_bare: bool = False) -> Frame:
        return Frame(index, block_hash, bytes(LAYOUT.block_bytes))


class Setup:
    """Leases on a pool, under a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool, self.registry = Pool(), CollectorRegistry()
        metrics = TransferMetrics(self.registry)
        self.leases = BlockLeases(self.pool, metrics, max_blocks=MAX_BLOCKS, clock=lambda: self.now)

    async def pin(self, count: int) -> Lease:
        lease = await self.leases.pin(hashes(count))
        assert lease is not None
        return lease

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"quire_kv_{name}")


STEPS = st.one_of(
    st.tuples(st.just("pin"), st.integers(0, 12)),
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("renew"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.integers(1, 4)),
)


@given(steps=st.lists(STEPS, max_size=30), num_present=st.integers(0, 12))
async def test_pins_and_leases_agree_and_the_limit_holds(
    steps: list[tuple[str, int]], num_present: int
) -> None:
    setup = Setup()
    setup.pool.num_present = num_present
    expected: dict[str, tuple[int, float]] = {}
    for step, number in steps:
        chosen = list(expected)[number % len(expected)] if expected else "none"
        if step == "pin":
            num_left = MAX_BLOCKS - sum(count for count, _ in expected.values())
            lease = await setup.leases.pin(hashes(number))
            num_pinned = min(number, num_left, num_present)
            assert (0 if lease is None else len(lease.block_ids)) == num_pinned
            if lease is not None:
                assert lease.block_hashes == hashes(num_pinned)
                expected[lease.lease_id] = (num_pinned, setup.now + LEASE_SECONDS)
        elif step == "release":
            setup.leases.release(chosen)
            expected.pop(chosen, None)
        elif step == "renew" and expected:
            setup.leases.renew(chosen)
            expected[chosen] = (expected[chosen][0], setup.now + LEASE_SECONDS)
        elif step == "wait":
            setup.now += number
            setup.leases.sweep()
            expected = {name: each for name, each in expected.items() if each[1] > setup.now}
        assert setup.pool.pins == {name: count for name, (count, _) in expected.items()}
        assert setup.metric("leases") == len(expected)


async def test_an_expired_lease_ends_before_the_sweep() -> None:
    setup = Setup()
    lease = await setup.pin(3)
    setup.now += LEASE_SECONDS
    with pytest.raises(UnknownLeaseError, match="pin the blocks again"):
        setup.leases.renew(lease.lease_id)
    assert lease.is_closed
    assert setup.pool.pins == {}
    assert setup.metric("leases_expired_total") == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_pin_that_fails_holds_no_blocks(is_cancelled: bool) -> None:
    setup = Setup()
    pinning = setup.pool.pinning = asyncio.get_running_loop().create_future()
    failing = asyncio.create_task(setup.leases.pin(hashes(MAX_BLOCKS)))
    await asyncio.sleep(0)
    assert await setup.leases.pin(hashes(1)) is None, "all blocks are taken while the pin runs"
    if is_cancelled:
        failing.cancel()
    else:
        pinning.set_exception(NoBlocksError("stopping"))
    with pytest.raises(asyncio.CancelledError if is_cancelled else NoBlocksError):
        await failing
    assert setup.pool.is_unpinned.is_set(), "the pool may have pinned the blocks before the error"
    setup.pool.pinning = None
    assert len((await setup.pin(MAX_BLOCKS)).block_ids) == setup.pool.num_present


async def test_a_puller_that_vanished_is_found_by_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "SWEEP_SECONDS", 0.0)
    setup = Setup()
    await setup.pin(3)
    sweeping = asyncio.create_task(setup.leases.sweep_forever())
    setup.now += LEASE_SECONDS
    await asyncio.wait_for(setup.pool.is_unpinned.wait(), 10)
    sweeping.cancel()
    assert setup.pool.pins == {}
