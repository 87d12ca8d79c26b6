"""Serves one worker: builds its parts from the settings, and serves the given services."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial

import torch

from quire.engine.runner.processors import as_ranges
from quire.kvindex.block_hash import revision
from quire.kvindex.publisher import BlockPublisher
from quire.kvtransfer.leases import BlockLeases
from quire.kvtransfer.pull_server import KvPullServicer
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.call_limits import READ_SECONDS
from quire.rpc.cluster_proof import RequireProof
from quire.rpc.health import READY, Health
from quire.rpc.server import GrpcServer, Service, Stop, grpc_server, serve_until_signal, tell_log
from quire.rpc.tls import server_credentials
from quire.services.server.background import in_background
from quire.services.server.log import EventLogger, configure_logging
from quire.services.server.loop_lag import LoopLagMetrics, loop_lag_observed
from quire.services.server.metrics_server import Probes, metrics_server
from quire.services.server.process import keep_freed_buffers
from quire.services.worker.blocks.pool_source import PoolSource
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.lifecycle.address import reachable_address
from quire.services.worker.lifecycle.drain import drain_before_exit
from quire.services.worker.lifecycle.engine import start_engine
from quire.services.worker.lifecycle.membership import join
from quire.services.worker.lifecycle.models import identify, load_models
from quire.services.worker.lifecycle.start import Start, begin
from quire.services.worker.parts import WorkerParts, assemble_parts
from quire.services.worker.state import WorkerState

Compose = Callable[[WorkerConfig, WorkerParts], Awaitable[Sequence[Service]]]
"""Function that makes the services over a worker's parts; each process passes its own."""

PULL_SERVICE = "quire.v1.KvPullService"

LEASED_SHARE = 0.3
"""Largest share of the pool that other workers' leases may protect from eviction."""

ROUTER_READ_SECONDS = 2 * READ_SECONDS
"""A router stops reading while its client does. It drops this client before the worker drops the router."""

MIN_PING_SECONDS = 0.1
"""Routers may ping this often; they do every two seconds."""

UNLEASED = Health("not_ready", "it has no lease in Redis yet, so no router finds it")
STALLED = Health("stalled", "the engine's step takes more than ten times as long as such steps take")

_log = EventLogger("worker")


async def serve(
    config: WorkerConfig, compose: Compose, on_ready: Callable[[RunningWorker], None] | None
) -> None:
    """Load the model and serve it until a signal.

    Raises:
        EngineStoppedError: the engine has failed or is stuck; a supervisor may restart the worker.
    """
    worker_id = config.worker_id or f"{config.role}-{secrets.token_hex(4)}"
    configure_logging(config.log_level, process=worker_id)
    _warn_of_lost_processors(config)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_buffers()
    models = await asyncio.to_thread(load_models, config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, models.close)
        identity = identify(config, worker_id, models)
        start = begin(config, models, identity, stack)
        engine = await start_engine(start)
        lag = await stack.enter_async_context(loop_lag_observed(LoopLagMetrics(start.registry)))
        parts = await assemble_parts(start, engine)
        services = [*await compose(config, parts), await _pull_service(parts, stack)]
        server = await stack.enter_async_context(_server(start, services))
        server.call_before_end(parts.outputs.close)
        server.call_before_end(parts.reports.close)
        start.address.set_result(reachable_address(config, server))
        metrics_port = stack.enter_context(
            metrics_server(start.registry, Probes(server, lag), config.host, config.metrics_port)
        )
        start.metrics_port.set_result(metrics_port)
        if start.publisher is not None:
            record = partial(identity.record, start.address.result(), start.state)
            await join(start.publisher, record, start.state, start.failure, stack)
        if start.events is not None:
            start.events.start(identity.record(start.address.result(), start.state))
            stack.push_async_callback(start.events.close)
        await stack.enter_async_context(in_background(engine.watch()))
        readiness = _report_readiness(server, start.state, start.publisher)
        await stack.enter_async_context(in_background(readiness))
        _log_ready(start)
        if on_ready is not None:
            on_ready(_running(identity, server, metrics_port))
        drain = partial(
            drain_before_exit, start.state, parts.requests.tasks, start.publisher, config.notice_seconds
        )
        await serve_until_signal(server, Stop(drain, lambda: len(parts.requests), tell_log), start.failure)


def _warn_of_lost_processors(config: WorkerConfig) -> None:
    """Log which of its processors the worker may not use any more."""
    if config.cpus is not None and (lost := set(config.cpus) - os.sched_getaffinity(0)):
        _log.warning("processors_taken_away", processors=as_ranges(lost))


async def _pull_service(parts: WorkerParts, stack: AsyncExitStack) -> Service:
    """Return the service from which other workers copy this worker's blocks."""
    identity, memory = parts.identity, parts.memory
    leases = BlockLeases(
        PoolSource(parts.engine, parts.blocks, identity.layout, identity.epoch),
        parts.transfers,
        max_blocks=max(1, int(LEASED_SHARE * memory.num_blocks)),
    )
    await stack.enter_async_context(in_background(leases.sweep_forever()))
    return Service(
        kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server,
        KvPullServicer(leases, parts.transfers, parts.transports),
        PULL_SERVICE,
    )


def _server(start: Start, services: Sequence[Service]) -> AbstractAsyncContextManager[GrpcServer]:
    """Return the server of the worker's services; if there is a cluster secret, calls must prove it."""
    config, guards = start.config, []
    if config.cluster_secret:
        guards.append(RequireProof(config.cluster_secret, start.identity.epoch, start.address.result))
    return grpc_server(
        services,
        host=config.host,
        port=config.port,
        registry=start.registry,
        grace_seconds=config.grace_seconds,
        credentials=None if config.cluster_tls is None else server_credentials(config.cluster_tls),
        interceptors=guards,
        read_seconds=ROUTER_READ_SECONDS,
        min_ping_seconds=MIN_PING_SECONDS,
    )


async def _report_readiness(server: GrpcServer, state: WorkerState, publisher: BlockPublisher | None) -> None:
    """Report the worker's health until cancelled: after its first lease, whether the engine makes progress.

    Before its first lease no router finds the worker. Later, routers keep it even without a lease.
    """
    if publisher is not None:
        await server.report(UNLEASED)
        await publisher.has_joined.wait()
    has_changed = asyncio.Event()
    state.call_on_change(has_changed.set)
    while True:
        has_changed.clear()
        await server.report(STALLED if state.is_stalled else READY)
        await has_changed.wait()


def _log_ready(start: Start) -> None:
    address = start.address.result()
    identity = start.identity
    _log.info(
        "worker_ready",
        role=start.state.role,
        address=address,
        blocks=identity.num_blocks,
        arithmetic=identity.layout.arithmetic,
        revision=revision(identity.cache_descriptor),
    )
    if start.publisher is None:
        remedy = f"give router and workers --redis-url, or the router --worker {address}"
        _log.warning("worker_not_registered", details=f"no router finds this worker by itself: {remedy}")


def _running(identity: WorkerIdentity, server: GrpcServer, metrics_port: int) -> RunningWorker:
    return RunningWorker(
        worker_id=identity.worker_id,
        address=server.address,
        metrics_port=metrics_port,
        model=identity.model,
        num_blocks=identity.num_blocks,
        max_model_len=identity.max_model_len,
        epoch=identity.epoch,
    )
