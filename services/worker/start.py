"""The steps of a worker's start: its engine, what its services share, and its server."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, ProcessCollector

from quire.engine.engine_thread import EngineFailedError, EngineStoppedError, EngineThread
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.ranks.ranks import Ranks
from quire.engine.runner.step_watch import StepWatch
from quire.engine.structured_output.grammar import GrammarCompiler
from quire.kvindex.block_hash import block_hash
from quire.kvindex.instrumented_index import InstrumentedLease, PublisherMetrics
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import WorkerLease, publisher_client
from quire.kvtransfer.leases import BlockLeases
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.pull_server import KvPullServicer
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.call_limits import READ_SECONDS
from quire.rpc.channels import ChannelPool
from quire.rpc.cluster_proof import RequireProof
from quire.rpc.proof import Caller
from quire.rpc.server import GrpcServer, Service, grpc_server
from quire.rpc.tls import ClusterTls
from quire.services.server.background import in_background
from quire.services.server.log import get_logger
from quire.services.server.tracing import open_tracer
from quire.services.worker.blocks.block_reader import BlockReader
from quire.services.worker.blocks.pool_source import PoolSource
from quire.services.worker.blocks.prefix_pull import PrefixPuller
from quire.services.worker.blocks.transports import open_transports
from quire.services.worker.config import WILDCARDS, WorkerConfig
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.lifecycle.address import address_towards
from quire.services.worker.lifecycle.build import Models, build_engine, known_step_seconds, open_disk_cache
from quire.services.worker.parts import WorkerParts
from quire.services.worker.reports.metrics import (
    CacheInfo,
    EngineCollector,
    PromptMetrics,
    StepMetrics,
    ask_for_snapshot,
    describe_division,
    describe_role,
)
from quire.services.worker.reports.worker_reports import WorkerReports
from quire.services.worker.requests.output_streams import OutputStreams
from quire.services.worker.requests.running_requests import RunningRequests
from quire.services.worker.requests.sequence_reader import SequenceReader
from quire.services.worker.state import WorkerState
from quire.tokenization.tokenizer import load_model_files

PULL_SERVICE = "quire.v1.KvPullService"

LENT_SHARE = 0.3
"""Most of the pool that other workers' leases may keep from being evicted."""

ROUTER_READ_SECONDS = 2 * READ_SECONDS
"""A router stops reading while its client does, and is the first to drop that."""

MIN_PING_SECONDS = 0.1
"""Routers may ping this often; they do every two seconds."""

_log = get_logger("worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the steps of a worker's start have in common.

    Attributes:
        address: host:port at which others reach the worker, once the server is bound.
        failure: gets the error of an engine that fails or is given up.
        stack: ends what a step began, the latest first.
    """

    config: WorkerConfig
    models: Models
    identity: WorkerIdentity
    registry: CollectorRegistry
    publisher: BlockPublisher | None
    tls: ClusterTls | None
    address: asyncio.Future[str]
    failure: asyncio.Future[EngineStoppedError]
    state: WorkerState
    stack: AsyncExitStack


def begin(config: WorkerConfig, models: Models, identity: WorkerIdentity, stack: AsyncExitStack) -> Start:
    """Open the worker's connection to Redis, and prepare what is known only later."""
    loop, registry = asyncio.get_running_loop(), CollectorRegistry()
    return Start(
        config=config,
        models=models,
        identity=identity,
        registry=registry,
        publisher=_publisher(config, registry, stack),
        tls=None if config.cluster_tls is None else ClusterTls(config.cluster_tls),
        address=loop.create_future(),
        failure=loop.create_future(),
        state=WorkerState(config.role),
        stack=stack,
    )


def _publisher(
    config: WorkerConfig, registry: CollectorRegistry, stack: AsyncExitStack
) -> BlockPublisher | None:
    if config.redis_url is None:
        return None
    client = publisher_client(config.redis_url)
    stack.push_async_callback(client.aclose)
    ledger = PublishLedger()
    lease = InstrumentedLease(
        WorkerLease(client, config.lease_ttl_seconds), PublisherMetrics(registry, ledger)
    )
    beat_seconds = config.lease_ttl_seconds / 3
    return BlockPublisher(lease, ledger, asyncio.get_running_loop(), beat_seconds)


async def start_engine(start: Start) -> EngineThread:
    """Build the engine and start its thread."""
    config, models, stack = start.config, start.models, start.stack
    disk_cache = await asyncio.to_thread(open_disk_cache, config, models.memory, start.identity)
    if disk_cache is not None:
        stack.push_async_callback(asyncio.to_thread, disk_cache.close)
    engine = await asyncio.to_thread(
        build_engine,
        config,
        models,
        start.identity,
        start.publisher,
        disk_cache,
    )
    # The objects of the libraries and the model live as long as the process. Otherwise the garbage collector
    # visits all of them now and then, which stops the steps for a quarter of a second.
    gc.collect()
    gc.freeze()
    watch = StepWatch(config.max_step_seconds, await asyncio.to_thread(known_step_seconds, engine))
    thread = EngineThread(
        engine,
        StepMetrics(start.registry).stepped,
        start.failure.set_result,
        start.state.set_stalled,
        watch,
    )
    thread.start()
    stack.push_async_callback(_stop_engine, thread)
    if models.ranks is not None:
        _fail_with_ranks(thread, models.ranks)
    _describe(start.registry, thread, models.memory)
    describe_division(start.registry, config.tensor_parallel_size)
    return thread


def _fail_with_ranks(thread: EngineThread, ranks: Ranks) -> None:
    """Give the engine up when a rank fails, even if no step runs that would notice."""
    loop = asyncio.get_running_loop()

    def give_up(failure: Future[str]) -> None:
        error = EngineFailedError(f"the engine has failed: {failure.result()}")
        with suppress(RuntimeError):  # the loop is closed: the worker is ending
            loop.call_soon_threadsafe(thread.give_up, error)

    ranks.failure.add_done_callback(give_up)


async def _stop_engine(thread: EngineThread) -> None:
    if not await thread.stop():
        _log.error("engine_not_stopped", details="its step does not end; the process ends without it")


def _describe(registry: CollectorRegistry, thread: EngineThread, memory: KvMemory) -> None:
    """Let the metrics tell of the process, the engine and its blocks, as they are when they are asked for."""
    registry.register(EngineCollector(partial(ask_for_snapshot, thread)))
    ProcessCollector(registry=registry)
    CacheInfo(registry).describe(
        block_size=memory.shape.block_size,
        num_blocks=memory.num_blocks,
        block_bytes=memory.shape.block_bytes,
    )


async def assemble_parts(start: Start, engine: EngineThread) -> WorkerParts:
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
    transports = open_transports(config, identity.epoch, memory)
    stack.callback(transports.close)
    await stack.enter_async_context(in_background(channels.close_unused_forever()))
    model = start.models.model
    grammars = GrammarCompiler(lambda: _read_tokenizer(model.folder), model.vocab_size, model.eos_token_ids)
    reader = SequenceReader(identity, grammars)
    stack.callback(reader.close)
    prompts, transfers = PromptMetrics(start.registry), TransferMetrics(start.registry)
    reports = WorkerReports(start.state)
    describe_role(start.registry, lambda: start.state.role)
    return WorkerParts(
        identity=identity,
        address=start.address.result,
        engine=engine,
        memory=memory,
        reader=reader,
        requests=RunningRequests(engine, start.state, prompts.phases, tracer, reports.loads),
        state=start.state,
        reports=reports,
        outputs=OutputStreams(config.stream_interval),
        blocks=BlockReader(memory, await engine.call(lambda e: e.pool)),
        channels=channels,
        transports=transports,
        puller=PrefixPuller(engine, memory, identity.layout, block_hash, channels, transfers, transports),
        transfers=transfers,
        prompts=prompts,
    )


def _read_tokenizer(folder: Path) -> str:
    return (load_model_files(str(folder)).folder / "tokenizer.json").read_text("utf-8")


async def pull_service(parts: WorkerParts, stack: AsyncExitStack) -> Service:
    """Return the service that lends this worker's blocks to others."""
    identity, memory = parts.identity, parts.memory
    leases = BlockLeases(
        PoolSource(parts.engine, parts.blocks, identity.layout, identity.epoch),
        parts.transfers,
        max_blocks=max(1, int(LENT_SHARE * memory.num_blocks)),
    )
    await stack.enter_async_context(in_background(leases.sweep_forever()))
    return Service(
        kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server,
        KvPullServicer(leases, parts.transfers, parts.transports),
        PULL_SERVICE,
    )


def worker_server(start: Start, services: Sequence[Service]) -> AbstractAsyncContextManager[GrpcServer]:
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
        credentials=None if start.tls is None else start.tls.server_credentials(),
        interceptors=guards,
        read_seconds=ROUTER_READ_SECONDS,
        min_ping_seconds=MIN_PING_SECONDS,
    )


def reachable_address(config: WorkerConfig, server: GrpcServer) -> str:
    """Return the host:port at which others reach the worker."""
    if config.advertise is not None:
        return config.advertise
    if config.redis_url is not None and config.host in WILDCARDS:
        return address_towards(config.redis_url, server.port)
    return server.address
