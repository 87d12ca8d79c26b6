"""The router process: follows the workers, learns the model from them, serves the public API."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, ProcessCollector

from quire.kvindex.membership import POLL_SECONDS
from quire.kvtransfer.layout import KvLayout
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.protos import worker_pb2
from quire.services.grpc_server import (
    PUBLIC_MESSAGE_BYTES,
    GrpcServer,
    Service,
    end_on_sigterm,
    grpc_server,
    serve_until_signal,
)
from quire.services.log import get_logger
from quire.services.loop_lag import LoopLagMetrics, loop_lag_observed
from quire.services.metrics_server import metrics_server
from quire.services.open_files import raise_open_file_limit
from quire.services.router.admin import admin_server
from quire.services.router.admission import Admission
from quire.services.router.authentication import RequireTenant
from quire.services.router.generation import Cluster
from quire.services.router.http.times import HttpTimes
from quire.services.router.legs import Spawn
from quire.services.router.metrics import RouterMetrics
from quire.services.router.planner import Planner, PolicyConfig
from quire.services.router.policy import Blocks, Policy
from quire.services.router.servicer import SERVICE_NAME, GenerationServicer
from quire.services.router.slo import SloTargets
from quire.services.router.sources import Sources, open_sources
from quire.services.router.tenants import ApiKeys, Authenticator, NoKeys
from quire.services.router.workers import WorkerSet
from quire.services.router.write_back import WriteBackMetrics, WriteBacks
from quire.services.served_model import load_served_model
from quire.services.tls import ClusterTls, TlsFiles, server_context, server_credentials
from quire.services.tracing import open_tracer

if TYPE_CHECKING:
    from quire.services.router.http.server import HttpServer

DEFAULT_HTTP_PORT = 8502
STARTUP_POLL_SECONDS = 0.1
"""Pace of the look for workers until the router can serve."""

_log = get_logger("router")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What a router needs to know. Workers come from ``redis_url``, or else from ``worker_addresses``."""

    host: str = "127.0.0.1"
    port: int = 8500
    metrics_port: int = 0
    redis_url: str | None = field(default=None, repr=False)
    worker_addresses: tuple[str, ...] = ()
    http_port: int | None = None
    """Port of the OpenAI-compatible API, which needs the extra ``http``; None serves none."""
    http_times: HttpTimes = field(default_factory=HttpTimes)
    model: str | None = None
    """Folder or hub id of tokenizer and chat template; None takes what the workers name."""
    served_model_name: str | None = None
    """Name that clients use; None takes the workers'."""
    cluster_secret: bytes = field(default=b"", repr=False)
    """Keys the block hashes; must be the workers'."""
    api_keys_file: Path | None = None
    """Keys and their tenants, see ``tenants.ApiKeys``; None asks for no key."""
    public_tls: TlsFiles | None = None
    """Of both public ports; None leaves them plain. With an authority, clients must show a certificate."""
    cluster_tls: TlsFiles | None = None
    """Of the connections to workers, whose certificates have the same authority; None leaves them plain."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    request_timeout_seconds: float = 600.0
    max_requests: int = 1024
    write_back: bool = False
    """Prefill workers copy the blocks of answers in idle time."""
    placing: PolicyConfig = field(default_factory=PolicyConfig)
    join_wait_seconds: float = 2.0
    """How long a request waits for the very first worker."""
    slo: SloTargets = field(default_factory=SloTargets)
    otlp_endpoint: str | None = None
    """Where spans go, as http://host:4317; None traces nothing."""
    poll_seconds: float = POLL_SECONDS
    grace_seconds: float = 5.0

    def __post_init__(self) -> None:
        for address in self.worker_addresses:
            if self.worker_addresses.count(address) > 1:
                raise ValueError(f"--worker names {address} more than once: give each worker once")


def has_http() -> bool:
    """Return whether the extra that the HTTP API needs is installed."""
    return all(map(find_spec, ("aiohttp", "pydantic")))


class RouterAddresses(NamedTuple):
    """host:port of the public APIs and of the admin calls."""

    grpc: str
    http: str | None
    admin: str


class RunningRouter(NamedTuple):
    """A started router."""

    server: GrpcServer
    http: HttpServer | None
    metrics_port: int
    admin_address: str
    workers: WorkerSet
    metrics: RouterMetrics
    has_served: asyncio.Event
    """Set once requests can be served."""

    @property
    def address(self) -> str:
        """host:port of the public API."""
        return self.server.address

    @property
    def addresses(self) -> RouterAddresses:
        """Where clients reach the router."""
        http = self.http.address if self.http else None
        return RouterAddresses(self.server.address, http, self.admin_address)


async def run_router(config: RouterConfig, on_ready: Callable[[RunningRouter], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` is called once requests can be served."""
    end_on_sigterm()
    raise_open_file_limit()
    async with router(config) as running, asyncio.TaskGroup() as tasks:
        announcing = tasks.create_task(_announce(running, on_ready))
        await serve_until_signal(running.server, running.http.stop if running.http else None)
        announcing.cancel()


async def _announce(running: RunningRouter, on_ready: Callable[[RunningRouter], None] | None) -> None:
    await running.has_served.wait()
    _log.info("router_ready", address=running.address)
    if on_ready is not None:
        on_ready(running)


@asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[RunningRouter]:
    """Run a router until the context ends.

    Health is SERVING while the model's tokenizer is loaded and a decode worker is alive.
    """
    metrics = RouterMetrics(CollectorRegistry(), config.slo)
    cluster: asyncio.Future[Cluster] = asyncio.get_running_loop().create_future()
    cluster_tls = None if config.cluster_tls is None else ClusterTls(config.cluster_tls)
    clock = time.monotonic
    async with AsyncExitStack() as stack:
        instance = f"{socket.gethostname()}:{config.port}"
        tracer = await stack.enter_async_context(
            open_tracer(config.otlp_endpoint, service="quire-router", instance=instance, clock=clock)
        )
        ProcessCollector(registry=metrics.registry)
        await stack.enter_async_context(loop_lag_observed(LoopLagMetrics(metrics.registry)))
        authenticator = await stack.enter_async_context(_authenticator(config.api_keys_file))
        servicer = GenerationServicer(
            cluster,
            metrics,
            clock,
            authenticator,
            Admission(config.max_requests, metrics, clock),
            request_timeout_seconds=config.request_timeout_seconds,
            join_wait_seconds=config.join_wait_seconds,
            tracer=tracer,
        )
        sources = await stack.enter_async_context(_open_sources(config, metrics))
        connect = grpc.aio.insecure_channel if cluster_tls is None else cluster_tls.connect
        workers = WorkerSet(
            sources.membership, expected_fingerprint=sources.expected_fingerprint, connect=connect
        )
        stack.push_async_callback(workers.close)
        spawn = await stack.enter_async_context(background())
        metrics_port = stack.enter_context(metrics_server(metrics.registry, config.host, config.metrics_port))
        server = await stack.enter_async_context(_grpc_server(config, servicer, metrics, authenticator))
        admin = await stack.enter_async_context(
            admin_server(workers, config.admin_host, config.admin_port, cluster_tls)
        )
        http = None
        if config.http_port is not None:
            http = await stack.enter_async_context(_http_server(config, servicer, metrics))
        running = RunningRouter(server, http, metrics_port, admin.address, workers, metrics, asyncio.Event())

        async def join(info: worker_pb2.GetWorkerInfoResponse) -> None:
            cluster.set_result(await _cluster(config, info, workers, sources, metrics, spawn))

        following = asyncio.create_task(_follow_workers(running, cluster, join, config.poll_seconds))
        stack.push_async_callback(_cancel, following)
        _log.info(
            "router_started",
            address=server.address,
            http=http.address if http else "none",
            metrics_port=metrics_port,
            admin=admin.address,
            has_tls=config.public_tls is not None,
            has_api_keys=config.api_keys_file is not None,
            has_cluster_tls=cluster_tls is not None,
        )
        yield running


async def _cluster(
    config: RouterConfig,
    info: worker_pb2.GetWorkerInfoResponse,
    workers: WorkerSet,
    sources: Sources,
    metrics: RouterMetrics,
    spawn: Spawn,
) -> Cluster:
    """Load the model that a worker describes, and what places its requests."""
    model = await asyncio.to_thread(
        load_served_model, info, source=config.model, name=config.served_model_name
    )
    layout = KvLayout.from_proto(info.layout)
    blocks = Blocks(layout.block_size, layout.block_bytes)
    planner = Planner(config.placing, blocks, time.monotonic, Random())
    workers.on_leave = planner.forget
    write_backs = WriteBacks(spawn, WriteBackMetrics(metrics.registry)) if config.write_back else None
    return Cluster(model, workers, sources.prefixes(model), metrics, spawn, planner, write_backs=write_backs)


@asynccontextmanager
async def _authenticator(api_keys_file: Path | None) -> AsyncIterator[Authenticator]:
    """Yield who tells tenants; a key file is followed."""
    if api_keys_file is None:
        yield NoKeys()
        return
    keys = ApiKeys(api_keys_file)
    following = asyncio.create_task(keys.follow())
    try:
        yield keys
    finally:
        await _cancel(following)


def _open_sources(config: RouterConfig, metrics: RouterMetrics) -> AbstractAsyncContextManager[Sources]:
    return open_sources(
        config.redis_url,
        config.worker_addresses,
        config.cluster_secret,
        metrics.registry,
        asks_index=config.placing.policy is not Policy.APPROX,
    )


def _grpc_server(
    config: RouterConfig, servicer: GenerationServicer, metrics: RouterMetrics, authenticator: Authenticator
) -> AbstractAsyncContextManager[GrpcServer]:
    return grpc_server(
        [Service(pb_grpc.add_GenerationServiceServicer_to_server, servicer, SERVICE_NAME)],
        host=config.host,
        port=config.port,
        max_message_bytes=PUBLIC_MESSAGE_BYTES,
        registry=metrics.registry,
        grace_seconds=config.grace_seconds,
        credentials=None if config.public_tls is None else server_credentials(config.public_tls),
        interceptors=[RequireTenant(authenticator)],
    )


def _http_server(
    config: RouterConfig, servicer: GenerationServicer, metrics: RouterMetrics
) -> AbstractAsyncContextManager[HttpServer]:
    if not has_http():
        raise OSError("the HTTP API needs packages that are not here: pip install 'quire[http]'")
    # Imported late: a router that speaks gRPC alone does without the extra.
    from quire.services.router.http.server import http_server

    return http_server(
        servicer,
        metrics.registry,
        host=config.host,
        port=config.http_port or 0,
        tls=None if config.public_tls is None else server_context(config.public_tls),
        times=config.http_times,
        request_timeout_seconds=config.request_timeout_seconds,
        grace_seconds=config.grace_seconds,
    )


async def _follow_workers(
    running: RunningRouter,
    cluster: asyncio.Future[Cluster],
    join: Callable[[worker_pb2.GetWorkerInfoResponse], Coroutine[Any, Any, None]],
    poll_seconds: float,
) -> None:
    """Keep workers, model and health up to date, for ever."""
    workers = running.workers
    while True:
        try:
            await workers.refresh()
            if workers.reference is not None and not cluster.done():
                await join(workers.reference)
        except Exception:
            _log.exception("refresh_failed")
        for role in ("prefill", "decode"):
            running.metrics.workers.labels(role).set(len(workers.live(role)))
        is_ready = cluster.done() and bool(workers.live("decode"))
        await (running.server.ready() if is_ready else running.server.not_ready())
        if is_ready:
            running.has_served.set()
        await asyncio.sleep(poll_seconds if is_ready else min(poll_seconds, STARTUP_POLL_SECONDS))


@asynccontextmanager
async def background() -> AsyncIterator[Spawn]:
    """Yield a way to run short coroutines beyond their caller's end; they are awaited at the end.

    What fails is logged: nobody else would hear of it.
    """
    tasks: set[asyncio.Task[None]] = set()

    def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(ended)
        return task

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background_failed", error=repr(error))

    yield spawn
    await asyncio.gather(*tasks, return_exceptions=True)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
