"""Every state that Redis may be in: requests go on, workers stay, and what it lost comes back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from quire.kvindex.block_hash import fingerprint
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import RedisIndex, WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.services.local.redis_process import RedisProcess
from quire.services.router.app import router
from quire.services.router.config import RouterConfig

pytestmark = pytest.mark.slow

PASSWORD = "known"
SECRET = b"secret"
LEASE_SECONDS = 0.6
BROKEN_SECONDS = 1.5
"""Longer than a lease."""
DELAY_SECONDS = 0.1
"""More than a look-up may take, and a tenth of what Redis' clients are made to wait for elsewhere."""
WAIT_SECONDS = 20.0
ROLES = {"p1": "prefill", "d1": "decode", "d2": "decode"}


@dataclass
class Server:
    """A Redis that can be replaced by another one on the same port."""

    process: RedisProcess = field(default_factory=lambda: RedisProcess(password=PASSWORD))

    async def ask(self, *command: object) -> Any:
        """Run a command as the user who may do everything."""
        async with Redis.from_url(self.process.url) as client:
            return await client.execute_command(*command)

    async def num_members(self) -> int:
        client = publisher_client(self.process.url)
        try:
            return len(await RedisIndex(client).members())
        finally:
            await client.aclose()

    async def restart(self) -> None:
        self.process.stop()
        self.process = RedisProcess(self.process.port, PASSWORD)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.process.stop()


@asynccontextmanager
async def publishing(cluster: Any, url: str) -> AsyncIterator[None]:
    """Give each fake worker a lease that it renews."""
    client = publisher_client(url)
    publishers = []
    try:
        for name, worker in cluster.workers.items():
            lease = WorkerLease(client, LEASE_SECONDS)
            loop = asyncio.get_running_loop()
            publisher = BlockPublisher(
                lease, PublishLedger(), loop, LEASE_SECONDS / 3, rejoin_jitter_seconds=0
            )
            publisher.start(record_of(name, worker))
            publishers.append(publisher)
        yield
    finally:
        for publisher in publishers:
            await publisher.close()
        await client.aclose()


def record_of(name: str, worker: Any, epoch: str = "1") -> WorkerRecord:
    return WorkerRecord(name, ROLES[name], worker.server.address, epoch, fingerprint(b"tiny", SECRET))


@asynccontextmanager
async def serving(
    cluster: Any, router_url: str, worker_url: str
) -> AsyncIterator[pb_grpc.GenerationServiceStub]:
    """Run workers and router; yield a client that tries nothing twice."""
    for name, role in ROLES.items():
        await cluster.add(name, role, secret=SECRET)
    async with publishing(cluster, worker_url):
        await cluster.start(redis_url=router_url, cluster_secret=SECRET, worker_addresses=())
        async with asyncio.timeout(WAIT_SECONDS):
            while len(live(cluster)) < len(ROLES):
                await asyncio.sleep(0.01)
            await cluster.running.has_served.wait()
        options = [("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(cluster.running.address, options=options) as channel:
            yield pb_grpc.GenerationServiceStub(channel)


def live(cluster: Any) -> list[str]:
    return sorted(worker.worker_id for worker in cluster.running.workers.all())


async def answers(cluster: Any, stub: pb_grpc.GenerationServiceStub, seconds: float) -> None:
    """Ask one question after the other for some time; all are answered at once, and no worker leaves."""
    loop = asyncio.get_running_loop()
    end, number = loop.time() + seconds, 0
    while loop.time() < end:
        number += 1
        prompt = pb.TokenIds(ids=[5 + number % 200] * 9)
        answer = await stub.Generate(
            pb.GenerateRequest(generation=pb.Generation(token_ids=prompt)), timeout=5
        )
        assert list(answer.choices[0].token_ids) == cluster.script.answer
        assert answer.usage.retries == 0
        assert cluster.running.server.health.is_ready
        assert live(cluster) == sorted(ROLES)


async def flushed(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    await server.ask("FLUSHALL")


async def restarted_empty(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    await server.restart()


async def away(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    server.process.stop()
    stack.push_async_callback(server.restart)


async def read_only(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    """A replica whose master is gone: leases end there, and no worker can renew its own."""
    await server.ask("REPLICAOF", "127.0.0.1", 1)
    stack.push_async_callback(server.ask, "REPLICAOF", "NO", "ONE")


async def refusing_workers(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    [rules] = [
        r.split()[2:] for r in map(bytes.decode, await server.ask("ACL", "LIST")) if "quire-worker" in r
    ]
    await server.ask("ACL", "SETUSER", "quire-worker", "-@all")
    stack.push_async_callback(server.ask, "ACL", "SETUSER", "quire-worker", "reset", *rules)


async def out_of_memory(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    await server.ask("CONFIG", "SET", "maxmemory", "1kb")
    await server.ask("FLUSHALL")
    stack.push_async_callback(server.ask, "CONFIG", "SET", "maxmemory", "512mb")


async def paused(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    await server.ask("CLIENT", "PAUSE", int(1000 * BROKEN_SECONDS), "ALL")


async def an_older_replica(server: Server, cluster: Any, stack: AsyncExitStack) -> None:
    """It knows a worker that is gone, a former life of one that is here, and nothing of the others."""
    async with Redis.from_url(server.process.url) as admin:
        await admin.execute_command("FLUSHALL")
        gone = WorkerRecord("gone", "decode", "127.0.0.1:1", "1", fingerprint(b"tiny", SECRET))
        for record in (gone, record_of("d1", cluster["d1"], epoch="0")):
            await WorkerLease(admin, 2 * BROKEN_SECONDS).join(record)


@pytest.mark.parametrize(
    "breaks",
    [*(flushed, restarted_empty, away, read_only, refusing_workers, out_of_memory, paused), an_older_replica],
)
async def test_requests_continue_and_leases_are_renewed(
    breaks: Callable[[Server, Any, AsyncExitStack], Awaitable[None]], server: Server, cluster: Any
) -> None:
    async with serving(cluster, server.process.router_url, server.process.worker_url) as stub:
        async with AsyncExitStack() as repair:
            await breaks(server, cluster, repair)
            await answers(cluster, stub, BROKEN_SECONDS)
        async with asyncio.timeout(WAIT_SECONDS):
            while await server.num_members() < len(ROLES):
                await asyncio.sleep(0.02)
        await answers(cluster, stub, 0.1)


async def test_a_router_ends_at_any_moment_of_its_talk_with_redis(server: Server) -> None:
    """Often redis-py takes a cancellation for a lost connection, and what was cancelled goes on."""
    for step in range(20):
        config = RouterConfig(
            port=0, metrics_port=0, redis_url=server.process.router_url, poll_seconds=0.001, grace_seconds=0
        )
        async with asyncio.timeout(WAIT_SECONDS):
            async with router(config):
                await asyncio.sleep(0.001 * step)


async def test_workers_join_through_a_slow_redis(server: Server, cluster: Any, forwarding: Any) -> None:
    async with forwarding(server.process.port, delay_seconds=DELAY_SECONDS) as port:
        urls = [
            url.replace(f":{server.process.port}/", f":{port}/")
            for url in (server.process.router_url, server.process.worker_url)
        ]
        async with serving(cluster, *urls) as stub:
            await answers(cluster, stub, 1.0)
