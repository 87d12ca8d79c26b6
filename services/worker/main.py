"""Builds what a worker's services share from its settings, and serves the services that are handed in."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio
import torch
from prometheus_client import CollectorRegistry, ProcessCollector

from quire.engine.device import choose_device
from quire.engine.engine import longest_sequence
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.kv_memory import KvMemory, dtype_name
from quire.engine.model_loader import LoadedModel, load_model
from quire.engine.step_watch import StepWatch
from quire.engine.structured_output import GrammarCompiler
from quire.kvindex.block_hash import block_hash
from quire.kvindex.instrumented_index import InstrumentedLease, PublisherMetrics
from quire.kvindex.kv_layout import KvLayout
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import WorkerLease, publisher_client
from quire.kvtransfer.channels import ChannelPool
from quire.kvtransfer.leases import BlockLeases
from quire.kvtransfer.malloc import keep_freed_buffers
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.proof import Caller
from quire.kvtransfer.pull_metrics import PullMetrics
from quire.kvtransfer.pull_server import KvPullServicer
from quire.models.source import pin_revision
from quire.protos import kvtransfer_pb2_grpc
from quire.services.server.call_limits import READ_SECONDS
from quire.services.server.cluster_proof import RequireProof
from quire.services.server.errors import BadFileError
from quire.services.server.grpc_server import (
    GrpcServer,
    Service,
    Stop,
    grpc_server,
    serve_until_signal,
    tell_log,
)
from quire.services.server.log import configure_logging, get_logger
from quire.services.server.loop_lag import LoopLagMetrics, loop_lag_observed
from quire.services.server.metrics_server import metrics_server
from quire.services.server.tls import ClusterTls
from quire.services.server.tracing import open_tracer
from quire.services.worker.address import WILDCARDS, address_towards
from quire.services.worker.build import (
    allocate_blocks,
    build_engine,
    full_step_seconds,
    load_draft,
    open_disk_cache,
)
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.services.worker.drain import Drain
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.metrics import (
    CacheInfo,
    EngineCollector,
    PromptMetrics,
    StepMetrics,
    ask_for_snapshot,
)
from quire.services.worker.parts import WorkerParts
from quire.services.worker.pool_source import PoolSource
from quire.services.worker.prefix_pull import PrefixPuller
from quire.services.worker.running_requests import RunningRequests
from quire.services.worker.sequence_reader import SequenceReader
from quire.tokenization.tokenizer import load_model_files

PULL_SERVICE = "quire.v1.KvPullService"

LENT_SHARE = 0.3
"""Most of the pool that other workers' leases may keep from being evicted."""

ROUTER_READ_SECONDS = 2 * READ_SECONDS
"""A router stops reading while its client does, and is the first to drop that."""

Compose = Callable[[WorkerConfig, WorkerParts], Awaitable[Sequence[Service]]]
"""Makes the services that use a worker's parts; a process hands in those of its choice."""

_log = get_logger("worker")


class _Models(NamedTuple):
    """What a worker computes with, and the memory of its blocks."""

    model: LoadedModel
    draft: LoadedModel | None
    memory: KvMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What the steps of a worker's start have in common.

    Attributes:
        address: host:port at which others reach the worker, once the server is bound.
        failure: gets the error of an engine that fails or is given up.
        stack: ends what a step began, the latest first.
    """

    config: WorkerConfig
    models: _Models
    identity: WorkerIdentity
    registry: CollectorRegistry
    publisher: BlockPublisher | None
    tls: ClusterTls | None
    address: asyncio.Future[str]
    failure: asyncio.Future[EngineStoppedError]
    stack: AsyncExitStack


async def serve(
    config: WorkerConfig, compose: Compose, on_ready: Callable[[RunningWorker], None] | None
) -> None:
    """Load the model and serve it until a signal.

    Raises:
        EngineStoppedError: the engine has failed or is stuck; a supervisor may start the worker anew.
    """
    worker_id = config.worker_id or f"{config.role}-{secrets.token_hex(4)}"
    configure_logging(config.log_level, process=worker_id)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_buffers()
    models = await _load_models(config)
    identity = _identify(config, worker_id, models.model, models.memory)
    async with AsyncExitStack() as stack:
        start = _begin(config, models, identity, stack)
        engine = await _start_engine(start)
        await stack.enter_async_context(loop_lag_observed(LoopLagMetrics(start.registry)))
        pulls = PullMetrics(start.registry)
        parts = await _assemble(start, engine, pulls)
        services = [*await compose(config, parts), _pull_service(parts, pulls, stack)]
        server = await stack.enter_async_context(_grpc_server(start, services))
        start.address.set_result(config.advertise or _reachable_address(config, server))
        metrics_port = stack.enter_context(metrics_server(start.registry, config.host, config.metrics_port))
        _join(start)
        watching = asyncio.create_task(engine.watch())
        stack.callback(watching.cancel)
        await server.ready()
        _log_ready(start)
        if on_ready is not None:
            on_ready(_running(identity, server, metrics_port))
        drain = partial(_drain, config, start.publisher, parts.requests)
        await serve_until_signal(server, Stop(drain, lambda: len(parts.requests), tell_log), start.failure)


async def _load_models(config: WorkerConfig) -> _Models:
    device = choose_device()
    with _named_model(config.model_path):
        model = await asyncio.to_thread(load_model, config.model_path, config.dtype, device)
    draft = await asyncio.to_thread(load_draft, config, model, device)
    return _Models(model, draft, allocate_blocks(config, model, draft, device))


def _begin(config: WorkerConfig, models: _Models, identity: WorkerIdentity, stack: AsyncExitStack) -> _Start:
    loop, registry = asyncio.get_running_loop(), CollectorRegistry()
    return _Start(
        config=config,
        models=models,
        identity=identity,
        registry=registry,
        publisher=_publisher(config, registry, stack),
        tls=None if config.cluster_tls is None else ClusterTls(config.cluster_tls),
        address=loop.create_future(),
        failure=loop.create_future(),
        stack=stack,
    )


async def _start_engine(start: _Start) -> EngineThread:
    """Build the engine and start its thread."""
    config, models, stack = start.config, start.models, start.stack
    disk_cache = await asyncio.to_thread(open_disk_cache, config, models.memory, start.identity)
    if disk_cache is not None:
        stack.push_async_callback(asyncio.to_thread, disk_cache.close)
    engine = await asyncio.to_thread(
        build_engine,
        config,
        models.model,
        models.draft,
        models.memory,
        start.identity,
        start.publisher,
        disk_cache,
    )
    watch = StepWatch(config.max_step_seconds, await asyncio.to_thread(full_step_seconds, engine))
    thread = EngineThread(engine, StepMetrics(start.registry).stepped, start.failure.set_result, watch)
    thread.start()
    stack.push_async_callback(_stop_engine, thread)
    _describe(start.registry, thread, models.memory)
    return thread


async def _assemble(start: _Start, engine: EngineThread, pulls: PullMetrics) -> WorkerParts:
    """Open what the services share: tracing, the connections to other workers, the compiler of formats."""
    config, identity, memory, stack = start.config, start.identity, start.models.memory, start.stack
    tracer = await stack.enter_async_context(
        open_tracer(
            config.otlp_endpoint,
            service=f"quire-{config.role}",
            instance=identity.worker_id,
            clock=time.perf_counter,
        )
    )
    connect = grpc.aio.insecure_channel if start.tls is None else start.tls.connect
    channels = ChannelPool(connect, Caller(config.cluster_secret))
    stack.push_async_callback(channels.close)
    closing_channels = asyncio.create_task(channels.close_unused_forever())
    stack.callback(closing_channels.cancel)
    model = start.models.model
    grammars = GrammarCompiler(lambda: _read_tokenizer(model.folder), model.vocab_size, model.eos_token_ids)
    reader = SequenceReader(identity, grammars)
    stack.callback(reader.close)
    prompts, drain = PromptMetrics(start.registry), Drain(partial(_announce, start))
    return WorkerParts(
        identity=identity,
        address=start.address.result,
        engine=engine,
        memory=memory,
        reader=reader,
        requests=RunningRequests(engine, drain, prompts.phases, tracer),
        drain=drain,
        channels=channels,
        puller=PrefixPuller(engine, memory, identity.layout, block_hash, channels, pulls),
        transfers=TransferMetrics(start.registry),
        prompts=prompts,
    )


def _announce(start: _Start, is_draining: bool) -> None:
    """Tell the routers whether an operator drains this worker."""
    if start.publisher is not None:
        record = start.identity.record(start.address.result())
        start.publisher.announce(replace(record, is_draining=is_draining))


def _pull_service(parts: WorkerParts, pulls: PullMetrics, stack: AsyncExitStack) -> Service:
    """Return the service that lends this worker's blocks to others."""
    identity, memory = parts.identity, parts.memory
    leases = BlockLeases(
        PoolSource(parts.engine, memory, identity.layout, identity.epoch),
        pulls,
        max_blocks=max(1, int(LENT_SHARE * memory.num_blocks)),
    )
    sweeping = asyncio.create_task(leases.sweep_forever())
    stack.callback(sweeping.cancel)
    return Service(
        kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server, KvPullServicer(leases, pulls), PULL_SERVICE
    )


def _grpc_server(start: _Start, services: Sequence[Service]) -> AbstractAsyncContextManager[GrpcServer]:
    config, guards = start.config, []
    if config.cluster_secret:
        guards.append(RequireProof(config.cluster_secret, start.identity.epoch, start.address.result))
    return grpc_server(
        services,
        host=config.host,
        port=config.port,
        registry=start.registry,
        grace_seconds=config.grace_seconds,
        credentials=None if start.tls is None else start.tls.server_credentials(),
        interceptors=guards,
        read_seconds=ROUTER_READ_SECONDS,
    )


def _join(start: _Start) -> None:
    """Publish the worker and its blocks, until it stops or its engine fails."""
    if start.publisher is None:
        return
    start.publisher.start(start.identity.record(start.address.result()))
    start.stack.push_async_callback(start.publisher.close)
    leaving = asyncio.create_task(_leave_on_failure(start.publisher, start.failure))
    start.stack.callback(leaving.cancel)


def _log_ready(start: _Start) -> None:
    address = start.address.result()
    _log.info("worker_ready", role=start.config.role, address=address, blocks=start.identity.num_blocks)
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


async def _drain(config: WorkerConfig, publisher: BlockPublisher | None, requests: RunningRequests) -> None:
    """Leave the cluster, let the running requests end, and tell those that do not that this worker stops."""
    try:
        if publisher is not None:
            await publisher.close()
            # Routers look who is there once a second; what they send until then is served.
            await asyncio.sleep(config.notice_seconds)
        # Running requests need their pushes, and pulls need their leases: the server takes calls.
        await requests.drain()
    finally:
        await requests.end()


@contextmanager
def _named_model(path: str) -> Iterator[None]:
    """Tell which model cannot be loaded: its folder is missing or holds none, or the hub does not have it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise BadFileError(f"cannot load the model {path}: {error}") from error


async def _stop_engine(thread: EngineThread) -> None:
    if not await thread.stop():
        _log.error("engine_not_stopped", details="its step does not end; the process ends without it")


async def _leave_on_failure(publisher: BlockPublisher, failure: asyncio.Future[EngineStoppedError]) -> None:
    """Give up the lease at once: the calls of a failed worker may take a while to end."""
    await asyncio.wait([failure])
    await publisher.close()


def _describe(registry: CollectorRegistry, thread: EngineThread, memory: KvMemory) -> None:
    """Let the metrics tell of the process, the engine and its blocks, as they are when they are asked for."""
    registry.register(EngineCollector(partial(ask_for_snapshot, thread)))
    ProcessCollector(registry=registry)
    CacheInfo(registry).describe(
        block_size=memory.shape.block_size,
        num_blocks=memory.num_blocks,
        block_bytes=memory.shape.block_bytes,
    )


def _reachable_address(config: WorkerConfig, server: GrpcServer) -> str:
    if config.redis_url is not None and config.host in WILDCARDS:
        return address_towards(config.redis_url, server.port)
    return server.address


def _identify(config: WorkerConfig, worker_id: str, model: LoadedModel, memory: KvMemory) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=worker_id,
        role=config.role,
        epoch=secrets.token_hex(8),
        model=config.model_name,
        model_path=pin_revision(config.model_path, model.folder),
        layout=KvLayout(
            **asdict(memory.shape),
            model_digest=model.digest,
            compute_dtype=dtype_name(model.dtype),
            device=memory.device.type,
        ),
        num_blocks=memory.num_blocks,
        max_model_len=longest_sequence(model, memory, config.max_model_len),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        request_timeout_seconds=config.request_timeout_seconds,
        cluster_secret=config.cluster_secret,
        index_stride=config.index_stride,
    )


def _read_tokenizer(folder: Path) -> str:
    return (load_model_files(str(folder)).folder / "tokenizer.json").read_text("utf-8")


def _publisher(
    config: WorkerConfig, registry: CollectorRegistry, stack: AsyncExitStack
) -> BlockPublisher | None:
    if config.redis_url is None:
        return None
    client = publisher_client(config.redis_url)
    stack.push_async_callback(client.aclose)
    ledger = PublishLedger(stride=config.index_stride)
    lease = InstrumentedLease(
        WorkerLease(client, config.lease_ttl_seconds), PublisherMetrics(registry, ledger)
    )
    beat_seconds = config.lease_ttl_seconds / 3
    return BlockPublisher(lease, ledger, asyncio.get_running_loop(), beat_seconds)
