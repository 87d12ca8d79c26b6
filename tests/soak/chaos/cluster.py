"""The processes of a chaos run, a private Redis, and a proxy before each server."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import grpc.aio
import redis.asyncio
import trustme

from quire.protos.admin_pb2 import ListWorkersRequest, ListWorkersResponse
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.protos.inference_pb2 import GetModelInfoRequest
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from quire.rpc.tls import CLUSTER_NAME
from quire.services.local.redis_process import RedisProcess
from tests.soak.chaos.commands import RESTART_SECONDS, Ports, Variant, router_command, worker_command
from tests.soak.chaos.journal import Journal
from tests.soak.chaos.processes import WatchedProcess
from tests.soak.chaos.proxy import Link, process_at, proxy_before
from tests.soak.chaos.schedule import REDIS, Shape
from tests.testing.certificates import write_certificate

_Check = Callable[[], Awaitable[bool]]
FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Ports below those that systems give to connections: a restarted process must find its own port free."""
_SECRET = "the secret of a chaos run"
_PASSWORD = "the password of a chaos run"


@dataclass(frozen=True)
class ClusterConfig:
    """What to start.

    Attributes:
        num_routers: number of routers; they share only Redis.
        num_blocks: blocks of each worker; few of them, so that blocks are evicted.
    """

    variant: Variant = "plain"
    num_routers: int = 1
    num_prefill: int = 2
    num_decode: int = 2
    num_blocks: int = 384

    @property
    def shape(self) -> Shape:
        """Names of the processes."""
        return Shape(
            _names("router", self.num_routers),
            _names("prefill", self.num_prefill),
            _names("decode", self.num_decode),
            has_disk=self.variant == "tiers",
            has_tls=self.variant == "tls",
        )


def _names(role: str, number: int) -> tuple[str, ...]:
    return tuple(f"{role}-{index}" for index in range(number))


@dataclass
class Cluster:
    """Running processes, and the links between them.

    Attributes:
        links: by the name of the process that connects and that of the server.
    """

    config: ClusterConfig
    journal: Journal
    index: RedisProcess
    processes: dict[str, WatchedProcess] = field(default_factory=dict)
    ports: dict[str, Ports] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)

    @property
    def shape(self) -> Shape:
        """Names of the processes."""
        return self.config.shape

    def serving_routers(self) -> list[str]:
        """Return the routers that a balancer would choose: those that are ready and do not end."""
        return [name for name in self.shape.routers if self.is_ready(name)]

    def is_ready(self, name: str) -> bool:
        """Return whether a process serves, and was not told to end."""
        return name in self._ready and not self.processes[name].is_ending

    async def restart(self, name: str) -> None:
        """Start a process that has ended, and return when the others use it."""
        before = await self.known_workers()
        await self.processes[name].start()
        if name in self.shape.routers:
            await self._until(self._has_workers(name), f"{name} knows the workers")
            self._ready.add(name)
            return
        address = self.address(name)
        old = {router: workers.get(address) for router, workers in before.items()}

        async def has_joined() -> bool:
            known = await self.known_workers()
            return bool(known) and all(
                workers.get(address) not in (None, old.get(router)) for router, workers in known.items()
            )

        await self._until(has_joined, f"{name} is known to the routers again")
        self._ready.add(name)

    def end(self, name: str, number: signal.Signals) -> None:
        """Send a process a signal that ends it."""
        self._ready.discard(name)
        self.processes[name].send(number)

    async def start(self) -> None:
        """Start all processes, and return when each router knows all workers."""
        for process in self.processes.values():
            await process.start()
        await self.until_complete()
        self._ready |= self.processes.keys()

    async def until_complete(self) -> None:
        """Return when each router knows all workers."""
        for name in self.shape.routers:
            await self._until(self._has_workers(name), f"{name} knows all workers")

    def address(self, worker: str) -> str:
        """Return the address at which others find a worker: that of its proxy."""
        return f"127.0.0.1:{self.ports[worker].proxy}"

    async def known_workers(self) -> dict[str, dict[str, str]]:
        """Return the id of the worker at each address, as each router that answers knows them."""
        answers = {name: await self.list_workers(name) for name in self.serving_routers()}
        return {
            name: {worker.address: worker.worker_id for worker in answer.workers}
            for name, answer in answers.items()
            if answer is not None
        }

    async def list_workers(self, router: str) -> ListWorkersResponse | None:
        """Ask a router for the workers that it knows; None if it does not answer."""
        address = f"127.0.0.1:{self.ports[router].admin}"
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                answer: ListWorkersResponse = await AdminServiceStub(channel).ListWorkers(
                    ListWorkersRequest(), timeout=10
                )
            except grpc.aio.AioRpcError:
                return None
            return answer

    def _has_workers(self, router: str) -> _Check:
        """Return the check that a router can serve requests and knows all workers."""

        async def has() -> bool:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports[router].grpc}") as channel:
                try:
                    info = await GenerationServiceStub(channel).GetModelInfo(
                        GetModelInfoRequest(), timeout=10
                    )
                except grpc.aio.AioRpcError:
                    return False
                numbers = (info.num_prefill_workers, info.num_decode_workers)
                return numbers == (len(self.shape.prefill), len(self.shape.decode))

        return has

    async def _until(self, is_reached: _Check, what: str) -> None:
        try:
            async with asyncio.timeout(RESTART_SECONDS):
                while True:
                    if await is_reached():
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self.journal.record_defect(f"not within {RESTART_SECONDS} s: {what}")

    # --- Redis ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def redis_admin(self) -> AsyncIterator[redis.asyncio.Redis]:
        """Yield a client of Redis that may do everything."""
        client = redis.asyncio.Redis.from_url(self.index.url, socket_timeout=5.0)
        try:
            yield client
        finally:
            await client.aclose()

    def restart_redis(self) -> None:
        """Replace a Redis that was killed by an empty one at the same port.

        Redis ends with the thread that started it, so this runs in the main thread.
        """
        port = self.index.port
        self.index.stop()
        self.index = RedisProcess(port=port, password=_PASSWORD)


@asynccontextmanager
async def running_cluster(config: ClusterConfig, journal: Journal) -> AsyncIterator[Cluster]:
    """Start Redis, proxies, workers and routers; on exit end every process."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-chaos-")))
        cluster = Cluster(config, journal, RedisProcess(password=_PASSWORD))
        stack.callback(lambda: cluster.index.stop())
        await _open_proxies(cluster, stack)
        _prepare_processes(cluster, folder)
        stack.push_async_callback(_end_all, cluster)
        await cluster.start()
        yield cluster


async def _open_proxies(cluster: Cluster, stack: AsyncExitStack) -> None:
    """Open a proxy before each worker, and one before Redis for each process."""
    shape = cluster.shape
    ports = _free_ports()
    for name in (*shape.routers, *shape.workers):
        cluster.ports[name] = Ports(*islice(ports, 5))
        links = {name: Link()}
        cluster.links[name, REDIS] = links[name]
        its = cluster.ports[name]
        await stack.enter_async_context(
            proxy_before(cluster.index.port, links, partial(_only_source, name), its.redis)
        )

    def source_of(port: int, server_port: int) -> str:
        pids = {name: process.pid for name, process in cluster.processes.items()}
        running = {name: pid for name, pid in pids.items() if pid is not None}
        return process_at(port, server_port, running)

    for worker in shape.workers:
        links = {source: Link() for source in (*shape.routers, *shape.workers)}
        cluster.links |= {(source, worker): link for source, link in links.items()}
        its = cluster.ports[worker]
        await stack.enter_async_context(proxy_before(its.grpc, links, source_of, its.proxy))


def _only_source(name: str, port: int, server_port: int) -> str:
    return name


def _prepare_processes(cluster: Cluster, folder: Path) -> None:
    index, variant = cluster.index, cluster.config.variant
    certificate = write_certificate(trustme.CA(), folder, CLUSTER_NAME) if variant == "tls" else None
    for name in (*cluster.shape.workers, *cluster.shape.routers):
        ports = cluster.ports[name]
        if name in cluster.shape.routers:
            url, command = index.router_url, router_command(ports, certificate)
        else:
            url = index.worker_url
            command = worker_command(name, ports, variant, cluster.config.num_blocks, folder, certificate)
        url = url.replace(f":{index.port}/", f":{ports.redis}/")
        environment = {"QUIRE_REDIS_URL": url, "QUIRE_CLUSTER_SECRET": _SECRET}
        cluster.processes[name] = WatchedProcess(name, command, environment, cluster.journal)


async def _end_all(cluster: Cluster) -> None:
    """End routers before workers, in order; kill what does not end."""
    for names in (cluster.shape.routers, cluster.shape.workers):
        for name in names:
            cluster.processes[name].send(signal.SIGCONT)
            cluster.processes[name].send(signal.SIGTERM)
        for name in names:
            status = await cluster.processes[name].ended()
            if status != 0 and cluster.processes[name].num_starts:
                cluster.journal.record_defect(f"{name} ended with status {status} after SIGTERM")


def _free_ports() -> Iterator[int]:
    candidates = list(range(FIRST_PORT, LAST_PORT))
    random.shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            yield port
