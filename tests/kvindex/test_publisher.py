"""The publisher: whatever becomes of the index, it soon says again what the worker holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import RedisError

import quire.kvindex.publisher as publisher_module
from quire.kvindex.index import IndexFullError
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import RedisIndex, WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.services.local.redis_process import RedisProcess
from tests.testing.memory_index import MemoryIndex, MemoryLease, MemoryStore
from tests.testing.until import until

HASHES = [index.to_bytes(16, "little") for index in range(1, 1200)]


@asynccontextmanager
async def publishing(
    lease: Any, record: Any, ledger: PublishLedger | None = None
) -> AsyncIterator[BlockPublisher]:
    loop = asyncio.get_running_loop()
    ledger = ledger or PublishLedger()
    publisher = BlockPublisher(lease, ledger, loop, beat_seconds=0.02, rejoin_jitter_seconds=0.0)
    publisher.start(record)
    try:
        yield publisher
    finally:
        await publisher.close()


def has(depths: Any, index: Any, expected: dict[str, int]) -> Callable[[], Any]:
    async def ask() -> bool:
        try:
            return bool(await depths(index, HASHES) == expected)
        except RedisError:  # a connection of before
            return False

    return ask


async def test_it_follows_the_pool(backend: Any, record: Any, depths: Any) -> None:
    async with publishing(backend.lease(), record("a")) as publisher:
        await asyncio.to_thread(publisher.stored, HASHES)
        await until(has(depths, backend.index, {"a": len(HASHES)}))
        await asyncio.to_thread(publisher.removed, HASHES[:5:-1])
        await until(has(depths, backend.index, {"a": 6}))
        publisher.removed(HASHES[5::-1])
        publisher.stored(HASHES[:8])
        await until(has(depths, backend.index, {"a": 8}))
    assert await backend.index.members() == []
    assert await backend.num_entries() == 0


async def test_blocks_cached_before_the_start_are_published(backend: Any, record: Any, depths: Any) -> None:
    loop = asyncio.get_running_loop()
    publisher = BlockPublisher(backend.lease(), PublishLedger(), loop, beat_seconds=0.02)
    publisher.stored(HASHES[:4])
    publisher.removed(HASHES[3:4])
    publisher.start(record("a"))
    await until(has(depths, backend.index, {"a": 3}))
    await publisher.close()
    await publisher.close()


async def test_it_refills_a_flushed_index(backend: Any, record: Any, depths: Any) -> None:
    async with publishing(backend.lease(), record("a")) as publisher:
        publisher.stored(HASHES[:700])
        await until(has(depths, backend.index, {"a": 700}))
        await backend.flush()
        publisher.removed(HASHES[699:698:-1])
        await until(has(depths, backend.index, {"a": 699}))


async def test_it_publishes_again_after_its_lease_expired(backend: Any, record: Any, depths: Any) -> None:
    async with publishing(backend.lease(), record("a")) as publisher:
        publisher.stored(HASHES[:3])
        await until(has(depths, backend.index, {"a": 3}))
        await backend.expire("a")
        await until(has(depths, backend.index, {"a": 3}))


async def test_more_evictions_than_can_wait_begin_a_new_epoch(backend: Any, record: Any, depths: Any) -> None:
    async with publishing(backend.lease(), record("a"), PublishLedger(max_evictions=10)) as publisher:
        publisher.stored(HASHES[:100])
        await until(has(depths, backend.index, {"a": 100}))
        publisher.removed(HASHES[99:49:-1])
        await until(has(depths, backend.index, {"a": 50}))


class NarrowLease(MemoryLease):
    """A lease on an index that has no room at times."""

    num_refused = 0
    is_full = False

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        if self.is_full:
            self.num_refused += 1
            raise IndexFullError
        await super().publish(block_hashes)


async def test_it_waits_for_room_and_keeps_its_lease(
    record: Any, depths: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "FULL_SECONDS", 0.01)
    store = MemoryStore()
    lease, index = NarrowLease(store, 30.0), MemoryIndex(store)
    async with publishing(lease, record("a")) as publisher:
        publisher.stored(HASHES[:3])
        await until(has(depths, index, {"a": 3}))
        (joined,) = store.leases.values()
        lease.is_full = True
        publisher.stored(HASHES[3:5])
        await until(lambda: lease.num_refused >= 2)
        publisher.removed(HASHES[4:1:-1])
        await until(has(depths, index, {"a": 2}))
        publisher.stored(HASHES[2:7])
        lease.is_full = False
        await until(has(depths, index, {"a": 7}))
        assert store.leases["a"].epoch == joined.epoch
    assert [each.message for each in caplog.records].count("index_full") == 1


class CountingLease(MemoryLease):
    """A lease that counts its renewals."""

    num_beats = 0

    async def beat(self) -> None:
        self.num_beats += 1
        await super().beat()


async def test_it_rests_after_a_publish_unless_many_blocks_wait(
    record: Any, depths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "REST_SECONDS", 3600.0)
    store = MemoryStore()
    lease, index = CountingLease(store, 30.0), MemoryIndex(store)
    async with publishing(lease, record("a")) as publisher:
        publisher.stored(HASHES[:-1])
        await until(has(depths, index, {"a": len(HASHES) - 1}))
        publisher.stored(HASHES[-1:])
        num_beats = lease.num_beats
        await until(lambda: lease.num_beats >= num_beats + 2)
        assert publisher.ledger.num_pending == 1


class InterruptedLease(MemoryLease):
    """A lease of which the first join takes until something else has happened."""

    def __init__(self, store: MemoryStore, meanwhile: Callable[[], None]) -> None:
        super().__init__(store, 30.0)
        self._meanwhile: Callable[[], None] | None = meanwhile

    async def join(self, record: WorkerRecord) -> None:
        await super().join(record)
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()


async def test_a_record_that_is_announced_during_a_join_is_published(record: Any) -> None:
    store, changed = MemoryStore(), replace(record("a"), is_draining=True)
    lease = InterruptedLease(store, lambda: publisher.announce(changed))

    async def is_changed() -> bool:
        return await MemoryIndex(store).members() == [changed]

    async with publishing(lease, record("a")) as publisher:
        await until(is_changed)


async def test_it_sweeps_the_entries_of_the_dead(backend: Any, record: Any) -> None:
    dead = backend.lease()
    await dead.join(record("dead"))
    await dead.publish(HASHES)
    await dead.leave()

    async def is_clean() -> bool:
        return bool(await backend.num_entries() == 0)

    async with publishing(backend.lease(), record("a")):
        await until(is_clean)


async def test_it_survives_a_restart_of_redis(record: Any, depths: Any) -> None:
    redis = RedisProcess(password="known")
    client = publisher_client(redis.url)
    index = RedisIndex(client)
    try:
        async with publishing(WorkerLease(client, 30.0), record("a")) as publisher:
            publisher.stored(HASHES[:4])
            await until(has(depths, index, {"a": 4}))
            redis.stop()
            publisher.stored(HASHES[4:7])
            redis = RedisProcess(port=redis.port, password="known")
            await until(has(depths, index, {"a": 7}))
    finally:
        await client.aclose()
        redis.stop()


async def test_it_starts_without_redis_and_ends_without_it(record: Any) -> None:
    client = publisher_client("redis://127.0.0.1:1/0")
    try:
        ledger = PublishLedger()
        async with asyncio.timeout(10.0), publishing(WorkerLease(client, 30.0), record("a"), ledger) as pub:
            pub.stored(HASHES)
            await asyncio.sleep(0)
            assert ledger.num_held == len(HASHES)
    finally:
        await client.aclose()
