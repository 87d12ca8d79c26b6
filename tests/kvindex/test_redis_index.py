"""The index on a real Redis: publish, evict, look up, leases, fences, recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from quire.kvindex.membership import WorkerRecord
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import LeaseLostError, RedisIndex, WorkerLease, publisher_client
from quire.services.redis_process import RedisProcess

TTL = 30.0
WAIT_SECONDS = 10.0
HASHES = [index.to_bytes(16, "little") for index in range(1, 1200)]


@pytest.fixture(scope="module")
def redis_process() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


@pytest.fixture
async def client(redis_process: RedisProcess) -> AsyncIterator[Redis]:
    client = publisher_client(redis_process.url)
    await client.flushall()
    yield client
    await client.aclose()


def record(name: str) -> WorkerRecord:
    return WorkerRecord(name, "prefill", f"{name}:1", "epoch", "fingerprint")


async def joined(client: Redis, name: str, ttl: float = TTL) -> WorkerLease:
    lease = WorkerLease(client, ttl)
    await lease.join(record(name))
    return lease


async def depths(client: Redis, hashes: list[bytes]) -> dict[str, int]:
    return {h.worker.worker_id: h.num_blocks for h in await RedisIndex(client).look_up(hashes)}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not await condition():  # type: ignore[misc]
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("held", [1, 2, 511, 512, 513, 1199])
async def test_depth_of_each_holder(held: int, client: Redis) -> None:
    a, b = await joined(client, "a"), await joined(client, "b")
    await a.publish(HASHES[:held])
    await b.publish(HASHES[:1])
    assert await depths(client, HASHES) == {"a": held, "b": 1}
    assert await depths(client, HASHES[:1]) == {"a": 1, "b": 1}
    assert await depths(client, HASHES[1:]) == ({"a": held - 1} if held > 1 else {})
    assert await depths(client, []) == {}


async def test_evicted_blocks_are_not_found(client: Redis) -> None:
    lease = await joined(client, "a")
    await lease.publish(HASHES[:10])
    await lease.evict(HASHES[9:4:-1])
    assert await depths(client, HASHES) == {"a": 5}
    await lease.evict(HASHES[4::-1])
    assert await depths(client, HASHES) == {}
    assert [key async for key in client.scan_iter("{quire}:b:*")] == []


async def test_a_new_life_forgets_the_old_one(client: Redis) -> None:
    lease = await joined(client, "a")
    await lease.publish(HASHES[:10])
    await lease.join(record("a"))
    assert await depths(client, HASHES) == {}
    await lease.publish(HASHES[:3])
    assert await depths(client, HASHES) == {"a": 3}


async def test_a_zombie_is_fenced(client: Redis) -> None:
    zombie = await joined(client, "a")
    await zombie.publish(HASHES[:10])
    successor = await joined(client, "a")
    await successor.publish(HASHES[:2])
    with pytest.raises(LeaseLostError):
        await zombie.publish(HASHES[:10])
    with pytest.raises(LeaseLostError):
        await zombie.beat()
    await zombie.evict(HASHES[1::-1])
    assert await depths(client, HASHES) == {"a": 2}


async def test_a_dead_worker_vanishes_with_its_lease(client: Redis) -> None:
    lease = await joined(client, "a", ttl=0.05)
    await lease.publish(HASHES[:10])
    index = RedisIndex(client)

    async def is_gone() -> bool:
        return not await index.members()

    await until(is_gone)
    assert await depths(client, HASHES) == {}


async def test_members_are_the_live_leases(client: Redis) -> None:
    a, _ = await joined(client, "a"), await joined(client, "b")
    index = RedisIndex(client)
    assert sorted(m.worker_id for m in await index.members()) == ["a", "b"]
    await a.leave()
    assert [m.worker_id for m in await index.members()] == ["b"]


async def test_the_publisher_follows_the_pool_and_survives_a_flush(client: Redis) -> None:
    loop = asyncio.get_running_loop()
    publisher = BlockPublisher(WorkerLease(client, TTL), loop, beat_seconds=0.05)
    publisher.start(record("a"))
    try:
        await asyncio.to_thread(publisher.stored, HASHES[:10])
        await asyncio.to_thread(publisher.removed, HASHES[9:5:-1])

        async def has_six() -> bool:
            return await depths(client, HASHES) == {"a": 6}

        await until(has_six)
        await client.flushall()
        await until(has_six)
    finally:
        await publisher.close()
    assert await RedisIndex(client).members() == []


async def test_the_publisher_survives_a_restart_of_redis() -> None:
    redis = RedisProcess(password="known")
    client = publisher_client(redis.url)
    publisher = BlockPublisher(WorkerLease(client, TTL), asyncio.get_running_loop(), beat_seconds=0.05)
    publisher.start(record("a"))
    try:
        publisher.stored(HASHES[:4])

        async def has_four() -> bool:
            return await depths(client, HASHES) == {"a": 4}

        await until(has_four)
        redis.stop()
        publisher.stored(HASHES[4:7])
        redis = RedisProcess(port=redis.port, password="known")

        async def has_seven() -> bool:
            try:
                return await depths(client, HASHES) == {"a": 7}
            except RedisError:  # a connection of before
                return False

        await until(has_seven)
    finally:
        await publisher.close()
        await client.aclose()
        redis.stop()
