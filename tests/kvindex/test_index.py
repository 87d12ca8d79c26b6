"""What every prefix index does."""

from __future__ import annotations

from typing import Any

import pytest

from quire.kvindex.index import LeaseLostError
from tests.testing.until import until

HASHES = [index.to_bytes(16, "little") for index in range(1, 1200)]


async def joined(backend: Any, record: Any, name: str, ttl_seconds: float = 30.0) -> Any:
    lease = backend.lease(ttl_seconds)
    await lease.join(record(name))
    return lease


@pytest.mark.parametrize("held", [1, 2, 511, 512, 513, 1199])
async def test_depth_of_each_holder(held: int, backend: Any, record: Any, depths: Any) -> None:
    a, b = await joined(backend, record, "a"), await joined(backend, record, "b")
    await a.publish(HASHES[:held])
    await b.publish(HASHES[:1])
    assert await depths(backend.index, HASHES) == {"a": held, "b": 1}
    assert await depths(backend.index, HASHES[:1]) == {"a": 1, "b": 1}
    assert await depths(backend.index, HASHES[1:]) == ({"a": held - 1} if held > 1 else {})
    assert await depths(backend.index, []) == {}


async def test_evicted_blocks_are_not_found(backend: Any, record: Any, depths: Any) -> None:
    lease = await joined(backend, record, "a")
    await lease.publish(HASHES[:10])
    await lease.evict(HASHES[9:4:-1])
    assert await depths(backend.index, HASHES) == {"a": 5}
    await lease.evict(HASHES[4::-1])
    assert await depths(backend.index, HASHES) == {}
    assert await backend.num_entries() == 0


async def test_a_lease_that_is_not_renewed_ends(backend: Any, record: Any, depths: Any) -> None:
    lease = await joined(backend, record, "a", ttl_seconds=0.05)
    await lease.publish(HASHES[:10])

    async def is_gone() -> bool:
        return not await backend.index.members()

    await until(is_gone)
    assert await depths(backend.index, HASHES) == {}
    with pytest.raises(LeaseLostError):
        await lease.beat()
    with pytest.raises(LeaseLostError):
        await lease.publish(HASHES[:1])


async def test_a_renewed_lease_lives(backend: Any, record: Any, depths: Any) -> None:
    short, other = await joined(backend, record, "a", 0.25), await joined(backend, record, "b", 0.25)
    await short.publish(HASHES[:3])

    async def has_outlived_the_other() -> bool:
        await short.beat()
        return len(await backend.index.members()) == 1

    await until(has_outlived_the_other)
    assert await depths(backend.index, HASHES) == {"a": 3}
    with pytest.raises(LeaseLostError):
        await other.beat()


async def test_members_are_the_live_leases(backend: Any, record: Any) -> None:
    a, _ = await joined(backend, record, "a"), await joined(backend, record, "b")
    members = await backend.index.members()
    assert sorted(members, key=lambda member: member.worker_id) == [record("a"), record("b")]
    await a.leave()
    assert await backend.index.members() == [record("b")]


async def test_a_worker_without_a_lease_can_still_remove_its_blocks(
    backend: Any, record: Any, depths: Any
) -> None:
    lease = await joined(backend, record, "a")
    await lease.publish(HASHES[:5])
    await lease.leave()
    assert await depths(backend.index, HASHES) == {}
    await lease.evict(HASHES[4::-1])
    assert await backend.num_entries() == 0


async def test_the_living_sweep_up_after_the_dead(backend: Any, record: Any, depths: Any) -> None:
    lives, dies, returns = [await joined(backend, record, name) for name in ("lives", "dies", "returns")]
    await lives.publish(HASHES[:700])
    await dies.publish(HASHES[100:1100])
    await returns.publish(HASHES[:50])
    await returns.join(record("returns"))
    await returns.publish(HASHES[:20])
    await backend.expire("dies")
    assert sum([await lives.sweep() for _ in range(20)]) == 1000 + 30
    assert await backend.num_entries() == 700
    assert await depths(backend.index, HASHES) == {"lives": 700, "returns": 20}
    with pytest.raises(LeaseLostError):
        await dies.beat()
    await dies.join(record("dies"))
    await dies.publish(HASHES[:3])
    assert await depths(backend.index, HASHES) == {"lives": 700, "returns": 20, "dies": 3}


async def test_the_next_lease_goes_on_with_the_sweep(backend: Any, record: Any) -> None:
    lives, dies = [await joined(backend, record, name) for name in ("lives", "dies")]
    await dies.publish(HASHES[:1100])
    await backend.expire("dies")
    for _ in range(20):
        await lives.sweep()
        await lives.join(record("lives"))
    assert await backend.num_entries() == 0
