"""Runs the router process: it follows the workers, loads the model that they describe, and serves the API."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector

from quire.kvtransfer.layout import layout_from_proto
from quire.protos import worker_pb2
from quire.routing.elastic_roles import ElasticRoles
from quire.routing.placement import Planner
from quire.routing.pressure import Targets
from quire.routing.pulls import Blocks
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.errors import BadFileError, Unavailable
from quire.rpc.health import Health
from quire.rpc.server import (
    Draining,
    GrpcServer,
    Stop,
    end_on_signals,
    serve_until_signal,
    tell_log,
)
from quire.rpc.tls import cluster_connect
from quire.services.requests.served_model import load_served_model
from quire.services.router.admin.admin import admin_server
from quire.services.router.admin.roles import RoleMetrics, Roles
from quire.services.router.config import RouterConfig
from quire.services.router.execution.cluster import Cluster
from quire.services.router.execution.pushes import Pushes
from quire.services.router.execution.suspects import Suspects
from quire.services.router.grpc.open_calls import OpenCalls, router_stops
from quire.services.router.grpc.request_memory import RequestMemory
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.metrics.metrics import Instruments, RouterMetrics
from quire.services.router.migration.copies import Copies, CopyMetrics
from quire.services.router.public_servers import public_grpc_server, public_http_server
from quire.services.router.sources import Sources, open_sources
from quire.services.router.tenants.admission import Admission
from quire.services.router.tenants.api_keys import ApiKeys, Authenticator, NoKeys
from quire.services.router.workers.queue import WorkerQueue
from quire.services.router.workers.silences import TICK_SECONDS
from quire.services.router.workers.tenant_turns import TenantTurns
from quire.services.router.workers.worker import can_continue
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.background import Spawn, background, in_background
from quire.services.server.log import EventLogger
from quire.services.server.loop_lag import LoopLagMetrics, loop_lag_observed
from quire.services.server.metrics_server import Probes, metrics_server
from quire.services.server.process import raise_open_file_limit
from quire.services.server.tracing import open_tracer

if TYPE_CHECKING:
    from quire.services.router.http.server import HttpServer

STARTUP_POLL_SECONDS = 0.1
"""Interval of the search for workers until the router can serve."""
READINESS_SECONDS = 0.1
"""Interval at which the health status follows the workers."""

_log = EventLogger("router")


class RouterAddresses(NamedTuple):
    """Addresses (host:port) of the public APIs and of the admin calls."""

    grpc: str
    http: str | None
    admin: str


class RunningRouter(NamedTuple):
    """A started router: its servers, its addresses and its workers."""

    server: GrpcServer
    http: HttpServer | None
    metrics_port: int
    admin_address: str
    workers: WorkerSet
    metrics: RouterMetrics
    has_served: asyncio.Event
    """Set once requests can be served."""
    failure: asyncio.Future[BadFileError]
    """Resolves with the error if a file of the model is damaged; no request can then be served."""
    calls: OpenCalls

    async def finish(self) -> None:
        """Refuse new requests from now on, and return when the running ones have ended."""
        await self.calls.finish()
        if self.http is not None:
            await self.http.finish()

    @property
    def address(self) -> str:
        """Address (host:port) of the public gRPC API."""
        return self.server.address

    @property
    def addresses(self) -> RouterAddresses:
        """Addresses of the public APIs and of the admin calls."""
        http = self.http.address if self.http else None
        return RouterAddresses(self.server.address, http, self.admin_address)


async def run_router(
    config: RouterConfig,
    on_ready: Callable[[RunningRouter], None] | None = None,
    on_drain: Callable[[Draining], None] = tell_log,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        on_ready: called once requests can be served.
        on_drain: called repeatedly while the router stops and waits for running requests to end.

    Raises:
        BadFileError: a file of the model's tokenizer or chat template is missing or damaged.
    """
    end_on_signals()
    raise_open_file_limit()
    async with router(config) as running:
        stop = Stop(running.finish, lambda: running.calls.number, on_drain)
        async with in_background(_announce(running, on_ready)):
            await serve_until_signal(running.server, stop, running.failure)


async def _announce(running: RunningRouter, on_ready: Callable[[RunningRouter], None] | None) -> None:
    await running.has_served.wait()
    # Libraries and the model's files live as long as the process. Unless they are frozen, the garbage
    # collector sometimes visits all of them, which stops every stream for 40 ms.
    gc.collect()
    gc.freeze()
    _log.info("router_ready", address=running.address)
    if on_ready is not None:
        on_ready(running)


@asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[RunningRouter]:
    """Run a router until the context ends.

    It is ready once the model's tokenizer has been loaded, while a decode worker can serve requests.
    """
    cluster: asyncio.Future[Cluster] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        instruments = await _open_instruments(config, stack)
        metrics = instruments.metrics
        lag = await stack.enter_async_context(loop_lag_observed(LoopLagMetrics(metrics.registry)))
        authenticator = await stack.enter_async_context(_authenticator(config.api_keys_file))
        sources = await stack.enter_async_context(
            open_sources(config.redis_url, config.worker_addresses, config.cluster_secret, metrics.registry)
        )
        servicer = GenerationServicer(
            cluster,
            instruments,
            authenticator,
            Admission(config.max_requests, metrics, instruments.clock, sources.usage),
            request_timeout_seconds=config.request_timeout_seconds,
            worker_wait_seconds=config.worker_wait_seconds,
        )
        workers = _worker_set(config, sources)
        stack.push_async_callback(workers.close)
        roles = _roles(config, workers, metrics, instruments.clock)
        spawn = await stack.enter_async_context(background())
        memory = RequestMemory(config.max_request_bytes, metrics)
        server = await stack.enter_async_context(
            public_grpc_server(config, servicer, metrics, memory, authenticator)
        )
        metrics_port = stack.enter_context(
            metrics_server(metrics.registry, Probes(server, lag), config.host, config.metrics_port)
        )
        admin = await stack.enter_async_context(_admin_server(config, workers, roles, metrics, metrics_port))
        http = None
        if config.http_port is not None:
            http = await stack.enter_async_context(public_http_server(config, servicer, metrics, memory))
        served, failure = asyncio.Event(), asyncio.get_running_loop().create_future()
        calls = servicer.calls
        running = RunningRouter(
            server, http, metrics_port, admin.address, workers, metrics, served, failure, calls
        )

        async def join(info: worker_pb2.GetWorkerInfoResponse) -> None:
            cluster.set_result(await _cluster(config, info, workers, sources, metrics, spawn))

        for until_cancelled in (
            _follow_workers(running, cluster, join, config.poll_seconds),
            _ask_busy_workers(workers, config.poll_seconds),
            _listen_to_workers(workers),
            _report_health(running, servicer.health),
        ):
            await stack.enter_async_context(in_background(until_cancelled))
        if config.elastic_roles:
            await stack.enter_async_context(in_background(roles.decide_forever(cluster)))
        _log_start(config, running)
        yield running


async def _open_instruments(config: RouterConfig, stack: AsyncExitStack) -> Instruments:
    metrics, clock = RouterMetrics(CollectorRegistry(), config.slo), time.monotonic
    instance = f"{socket.gethostname()}:{config.port}"
    tracer = await stack.enter_async_context(
        open_tracer(config.otlp_endpoint, service="quire-router", instance=instance, clock=clock)
    )
    ProcessCollector(registry=metrics.registry)
    return Instruments(metrics, tracer, clock)


def _worker_set(config: RouterConfig, sources: Sources) -> WorkerSet:
    return WorkerSet(
        sources.membership,
        expected_fingerprint=sources.expected_fingerprint,
        connect=cluster_connect(config.cluster_tls),
        silent_seconds=config.silent_seconds,
        trust=ClusterTrust(config.cluster_secret, has_tls=config.cluster_tls is not None),
    )


def _admin_server(
    config: RouterConfig, workers: WorkerSet, roles: Roles, metrics: RouterMetrics, metrics_port: int
) -> AbstractAsyncContextManager[GrpcServer]:
    metrics_address = f"{config.host}:{metrics_port}"
    port, launcher = config.chosen_admin_port, config.launcher_address
    return admin_server(workers, roles, metrics.tenants, metrics_address, port, launcher)


def _roles(
    config: RouterConfig, workers: WorkerSet, metrics: RouterMetrics, clock: Callable[[], float]
) -> Roles:
    controller = None
    if config.elastic_roles:
        controller = ElasticRoles(Targets(config.slo.ttft_seconds, config.slo.tpot_seconds), clock)
    return Roles(workers, RoleMetrics(metrics.registry), metrics.token_times, controller, clock)


def _log_start(config: RouterConfig, running: RunningRouter) -> None:
    _log.info(
        "router_started",
        address=running.address,
        http=running.http.address if running.http else "none",
        metrics_port=running.metrics_port,
        admin=running.admin_address,
        has_tls=config.public_tls is not None,
        has_api_keys=config.api_keys_file is not None,
        has_cluster_tls=config.cluster_tls is not None,
    )
    if config.redis_url is None and not config.worker_addresses:
        remedy = "give --redis-url, or --worker host:port for each worker"
        _log.warning("router_finds_no_workers", details=f"it has no place to look for them: {remedy}")


async def _cluster(
    config: RouterConfig,
    info: worker_pb2.GetWorkerInfoResponse,
    workers: WorkerSet,
    sources: Sources,
    metrics: RouterMetrics,
    spawn: Spawn,
) -> Cluster:
    """Load the tokenizer of the model that a worker describes, and set up the placement of requests."""
    model = await asyncio.to_thread(
        load_served_model,
        info,
        source=config.model,
        name=config.served_model_name,
        generation_config=config.generation_config,
    )
    model.adapters = workers.adapters
    model.descriptors = lambda: {worker.info.cache_descriptor for worker in workers.all()}
    layout = layout_from_proto(info.layout)
    blocks = Blocks(layout.block_size, layout.block_bytes)
    planner = Planner(config.placing, blocks, time.monotonic, Random())
    workers.call_on_leave(planner.forget)
    queue = WorkerQueue(
        lambda began: any(can_continue(each.info, began) for each in workers.serving("decode")),
        max_wait_seconds=config.worker_wait_seconds,
        waiting=metrics.requests_waiting,
    )
    workers.call_on_return(queue.wake)
    prefixes = sources.prefixes(model.block_size)
    turns = TenantTurns(lambda: len(workers.serving()), time.monotonic)
    suspects, pushes = Suspects(), Pushes()
    workers.call_on_leave(pushes.forget)
    copies = Copies(workers, spawn, CopyMetrics(metrics.registry), copies_grown=config.copy_answers)
    followers = (suspects.follow, copies.follow, pushes.follow)
    return Cluster(
        model, workers, queue, turns, prefixes, metrics, spawn, planner, suspects, pushes, followers
    )


@asynccontextmanager
async def _authenticator(api_keys_file: Path | None) -> AsyncIterator[Authenticator]:
    """Yield the authenticator; a key file is reloaded when it changes, until the context ends."""
    if api_keys_file is None:
        yield NoKeys()
        return
    keys = ApiKeys(api_keys_file)
    async with in_background(keys.follow()):
        yield keys


async def _follow_workers(
    running: RunningRouter,
    cluster: asyncio.Future[Cluster],
    join: Callable[[worker_pb2.GetWorkerInfoResponse], Coroutine[Any, Any, None]],
    poll_seconds: float,
) -> None:
    """Keep the workers and the model up to date until cancelled."""
    workers, problem = running.workers, ""
    while True:
        try:
            await workers.refresh()
            if workers.reference is not None and not cluster.done():
                await join(workers.reference)
            problem = ""
        except BadFileError as error:
            running.failure.set_result(error)
            return
        except Exception as error:
            if problem != (problem := repr(error)):  # the same problem is logged once
                _log.exception("refresh_failed")
        for role in ("prefill", "decode"):
            running.metrics.workers.labels(role).set(len(workers.live(role)))
        running.metrics.show_revisions(
            (each.revision, each.role, state) for each, state in workers.states().items()
        )
        is_complete = cluster.done() and workers.live("decode")
        if running.calls.is_stopping and not workers.live("decode") and not workers.expects_workers:
            _end_waits(cluster)
        await asyncio.sleep(poll_seconds if is_complete else min(poll_seconds, STARTUP_POLL_SECONDS))


async def _report_health(running: RunningRouter, health: Callable[[], Health]) -> None:
    """Keep the health status up to date until cancelled.

    This is a separate task, so that a slow membership or a silent worker does not delay the status.
    """
    while True:
        now = health()
        await running.server.report(now)
        if now.is_ready:
            running.has_served.set()
        await asyncio.sleep(READINESS_SECONDS)


def _end_waits(cluster: asyncio.Future[Cluster]) -> None:
    """End the requests that wait for a worker in a stopping router, because no worker has joined."""
    if not cluster.done():
        cluster.set_exception(_no_worker())
        cluster.exception()  # asyncio would report that no request has asked for it
    elif cluster.exception() is None:
        cluster.result().queue.end(_no_worker)


def _no_worker() -> Unavailable:
    return router_stops("no decode worker takes requests, and this router is stopping")


async def _ask_busy_workers(workers: WorkerSet, poll_seconds: float) -> None:
    """Probe the busy workers every ``poll_seconds`` until cancelled.

    This is a separate task, so that a slow membership does not delay the probes.
    """
    while True:
        await asyncio.sleep(poll_seconds)
        try:
            await workers.ask_busy()
        except Exception:
            _log.exception("ask_failed")


async def _listen_to_workers(workers: WorkerSet) -> None:
    """Detect workers that have vanished, until cancelled."""
    while True:
        await asyncio.sleep(TICK_SECONDS)
        workers.listen()
