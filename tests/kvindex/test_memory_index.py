"""The index in memory under a clock: when entries count, and which ones a sweep removes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kvindex.index import LeaseLostError
from quire.kvindex.memory_index import MemoryIndex, MemoryLease, MemoryStore
from quire.kvindex.worker_record import WorkerRecord

TTL_SECONDS = 10.0
HASHES = [bytes([index]) * 16 for index in range(6)]


class Setup:
    """An index and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = MemoryStore(clock=lambda: self.now)
        self.index = MemoryIndex(self.store)

    async def join(self, name: str) -> MemoryLease:
        lease = MemoryLease(self.store, TTL_SECONDS)
        await lease.join(WorkerRecord(name, "prefill", f"{name}:1", "epoch", "fingerprint"))
        return lease

    async def depths(self) -> dict[str, int]:
        return {each.worker.worker_id: each.num_blocks for each in await self.index.look_up(HASHES)}


async def test_a_lease_lives_until_its_time_is_over_and_no_longer() -> None:
    setup = Setup()
    lease = await setup.join("a")
    await lease.publish(HASHES[:2])
    setup.now += TTL_SECONDS - 0.5
    await lease.beat()
    setup.now += TTL_SECONDS - 0.5
    assert await setup.depths() == {"a": 2}
    setup.now += 0.5
    assert await setup.depths() == {}
    assert await setup.index.members() == []
    for failing in (lease.beat(), lease.publish(HASHES[:1])):
        with pytest.raises(LeaseLostError):
            await failing


async def test_a_hole_ends_the_prefix() -> None:
    setup = Setup()
    lease = await setup.join("a")
    await lease.publish([*HASHES[:2], *HASHES[3:]])
    assert await setup.depths() == {"a": 2}
    await lease.evict(HASHES[:1])
    assert await setup.depths() == {}


@given(
    published=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, len(HASHES) - 1)), max_size=12, unique=True
    ),
    rejoining=st.sets(st.sampled_from("abc")),
    expiring=st.sets(st.sampled_from("abc")),
)
async def test_a_sweep_removes_the_invalid_entries_and_no_others(
    published: list[tuple[str, int]], rejoining: set[str], expiring: set[str]
) -> None:
    setup = Setup()
    leases = {name: await setup.join(name) for name in "abc"}
    for name, index in published:
        await leases[name].publish([HASHES[index]])
    setup.now += TTL_SECONDS / 2
    for name in rejoining:
        await setup.join(name)
    for name in set("abc") - expiring - rejoining:
        await leases[name].beat()
    setup.now += TTL_SECONDS / 2
    kept = {(name, index) for name, index in published if name not in expiring | rejoining}
    found = await setup.depths()
    sweeper = await setup.join("sweeper")
    assert await sweeper.sweep() == len(published) - len(kept)
    assert {
        (name, HASHES.index(block_hash))
        for block_hash, names in setup.store.holders.items()
        for name in names
    } == kept
    assert await setup.depths() == found
    assert await sweeper.sweep() == 0
