"""Both kinds of index behind one face, and a real Redis."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.kvindex.redis_index import RedisIndex, WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.services.local.redis_process import RedisProcess
from tests.testing.memory_index import MemoryIndex, MemoryLease, MemoryStore


class MemoryBackend:
    """An index in memory."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.index = MemoryIndex(self._store)

    def lease(self, ttl_seconds: float = 30.0) -> MemoryLease:
        return MemoryLease(self._store, ttl_seconds)

    async def expire(self, worker_id: str) -> None:
        """Let a worker's time run out."""
        lease = self._store.leases.get(worker_id)
        if lease is not None:
            self._store.leases[worker_id] = replace(lease, expires_at=-math.inf)

    async def flush(self) -> None:
        self._store.clear()

    async def num_entries(self) -> int:
        return len(self._store.holders)

    async def close(self) -> None:
        pass


class RedisBackend:
    """An index in Redis; each side is the user that it is in production, and ``client`` may do everything."""

    def __init__(self, process: RedisProcess) -> None:
        self.client, self.reader, self.writer = (
            publisher_client(url) for url in (process.url, process.router_url, process.worker_url)
        )
        self.index = RedisIndex(self.reader)

    def lease(self, ttl_seconds: float = 30.0) -> WorkerLease:
        return WorkerLease(self.writer, ttl_seconds)

    async def expire(self, worker_id: str) -> None:
        slot = await self.client.hget("{q}slots", worker_id)
        assert isinstance(slot, bytes | None)
        await self.client.delete(b"{q}l" + (slot or b""))

    async def flush(self) -> None:
        await self.client.flushall()

    async def num_entries(self) -> int:
        return len([key async for key in self.client.scan_iter("{q}b*")])

    async def close(self) -> None:
        for client in (self.client, self.reader, self.writer):
            await client.aclose()


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


@pytest.fixture(params=["memory", "redis"])
def make_backend(request: pytest.FixtureRequest) -> Callable[[], MemoryBackend | RedisBackend]:
    if request.param == "memory":
        return MemoryBackend
    process: RedisProcess = request.getfixturevalue("redis_process")
    return lambda: RedisBackend(process)


@pytest.fixture
async def backend(make_backend: Callable[[], Any]) -> AsyncIterator[Any]:
    backend = make_backend()
    await backend.flush()
    yield backend
    await backend.close()


@pytest.fixture
async def redis_backend(redis_process: RedisProcess) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(redis_process)
    await backend.flush()
    yield backend
    await backend.close()


@pytest.fixture
def record() -> Callable[[str], WorkerRecord]:
    return lambda name: WorkerRecord(name, "prefill", f"{name}:1", "epoch", "fingerprint")


@pytest.fixture
def depths() -> Callable[[Any, list[bytes]], Awaitable[dict[str, int]]]:
    async def ask(index: Any, hashes: list[bytes]) -> dict[str, int]:
        return {each.worker.worker_id: each.num_blocks for each in await index.look_up(hashes)}

    return ask
