"""Builds a worker from its settings and serves it."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import torch
from prometheus_client import CollectorRegistry, ProcessCollector

from quire.engine.device import choose_device
from quire.engine.engine import longest_sequence
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel, load_model
from quire.engine.structured_output import GrammarCompiler
from quire.kvindex.block_hash import block_hash
from quire.kvindex.instrumented_index import InstrumentedLease, PublisherMetrics
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import WorkerLease, publisher_client
from quire.kvtransfer.channels import ChannelPool
from quire.kvtransfer.layout import KvLayout
from quire.kvtransfer.lender import KvPullServicer
from quire.kvtransfer.malloc import keep_freed_buffers
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.pin import BlockLeases
from quire.kvtransfer.pull_metrics import PullMetrics
from quire.kvtransfer.receiver import KvTransferServicer
from quire.protos import kvtransfer_pb2_grpc, worker_pb2_grpc
from quire.services.grpc_server import GrpcServer, Service, grpc_server, serve_until_signal
from quire.services.log import configure_logging, get_logger
from quire.services.loop_lag import LoopLagMetrics, loop_lag_observed
from quire.services.metrics_server import metrics_server
from quire.services.tls import ClusterTls
from quire.services.tracing import open_tracer
from quire.services.worker.address import WILDCARDS, address_towards
from quire.services.worker.app import RunningWorker, WorkerConfig
from quire.services.worker.borrow import PrefixPuller
from quire.services.worker.decode import Tickets
from quire.services.worker.engine_setup import allocate_blocks, build_engine, load_draft, open_disk_cache
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.lend import PoolSource
from quire.services.worker.metrics import (
    CacheInfo,
    EngineCollector,
    PromptMetrics,
    StepMetrics,
    ask_for_snapshot,
)
from quire.services.worker.servicer import WorkerServicer
from quire.tokenization.tokenizer import load_model_files

WORKER_SERVICE = "quire.v1.WorkerService"
KV_SERVICE = "quire.v1.KvTransferService"
PULL_SERVICE = "quire.v1.KvPullService"

LENT_SHARE = 0.3
"""Most of the pool that other workers' leases may keep from being evicted."""

_log = get_logger("worker")


async def serve(config: WorkerConfig, on_ready: Callable[[RunningWorker], None] | None) -> None:
    """Load the model and serve it until a signal.

    Raises:
        EngineStoppedError: the engine has failed; a supervisor may start the worker anew.
    """
    worker_id = config.worker_id or f"{config.role}-{secrets.token_hex(4)}"
    configure_logging(config.log_level, process=worker_id)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_freed_buffers()
    device = choose_device()
    model = await asyncio.to_thread(load_model, config.model_path, config.dtype, device)
    draft = await asyncio.to_thread(load_draft, config, model, device)
    memory = allocate_blocks(config, model, draft, device)
    identity = _identify(config, worker_id, model, memory)
    registry = CollectorRegistry()
    steps, transfers = StepMetrics(registry), TransferMetrics(registry)
    async with AsyncExitStack() as stack:
        publisher = _publisher(config, registry, stack)
        disk_cache = await asyncio.to_thread(open_disk_cache, config, memory, identity)
        if disk_cache is not None:
            stack.push_async_callback(asyncio.to_thread, disk_cache.close)
        engine = await asyncio.to_thread(
            build_engine, config, model, draft, memory, identity, publisher, disk_cache
        )
        failure: asyncio.Future[EngineStoppedError] = asyncio.get_running_loop().create_future()
        thread = EngineThread(engine, steps.stepped, failure.set_result)
        thread.start()
        stack.push_async_callback(thread.stop)
        _describe(registry, thread, memory)
        await stack.enter_async_context(loop_lag_observed(LoopLagMetrics(registry)))
        tracer = await stack.enter_async_context(
            open_tracer(
                config.otlp_endpoint,
                service=f"quire-{config.role}",
                instance=worker_id,
                clock=time.perf_counter,
            )
        )
        cluster_tls = None if config.cluster_tls is None else ClusterTls(config.cluster_tls)
        channels = ChannelPool() if cluster_tls is None else ChannelPool(cluster_tls.connect)
        stack.push_async_callback(channels.close)
        tickets = Tickets(thread, memory, identity.layout, identity.epoch)
        grammars = GrammarCompiler(
            lambda: _read_tokenizer(config.model_path), model.vocab_size, model.eos_token_ids
        )
        pulls = PullMetrics(registry)
        puller = PrefixPuller(thread, memory, identity.layout, block_hash, channels, pulls)
        prompts = PromptMetrics(registry)

        def announce(is_draining: bool) -> None:
            if publisher is not None:
                publisher.announce(replace(identity.record(tickets.address), is_draining=is_draining))

        servicer = WorkerServicer(
            identity,
            thread,
            memory,
            tickets,
            channels,
            transfers,
            grammars,
            puller,
            announce,
            prompts,
            tracer,
        )
        receiver = KvTransferServicer(tickets, transfers)
        leases = BlockLeases(
            PoolSource(thread, memory, identity.layout, identity.epoch),
            pulls,
            max_blocks=max(1, int(LENT_SHARE * memory.num_blocks)),
        )
        sweeping = asyncio.create_task(leases.sweep_forever())
        stack.callback(sweeping.cancel)
        services = _services(servicer, receiver, KvPullServicer(leases, pulls))
        if config.vllm_grpc:
            # Needs an extra.
            from quire.services.vllm_adapter.servicer import vllm_service

            services.append(
                await asyncio.to_thread(
                    vllm_service, servicer, identity, config.max_num_seqs, lambda: tickets.address
                )
            )
        server = await stack.enter_async_context(
            grpc_server(
                services,
                host=config.host,
                port=config.port,
                registry=registry,
                grace_seconds=config.grace_seconds,
                credentials=None if cluster_tls is None else cluster_tls.server_credentials(),
            )
        )
        tickets.address = config.advertise or _reachable_address(config, server)
        metrics_port = stack.enter_context(metrics_server(registry, config.host, config.metrics_port))
        if publisher is not None:
            publisher.start(identity.record(tickets.address))
            stack.push_async_callback(publisher.close)
        await server.ready()
        _log.info("worker_ready", role=config.role, address=tickets.address, blocks=memory.num_blocks)
        running = RunningWorker(
            worker_id=worker_id,
            address=server.address,
            metrics_port=metrics_port,
            model=identity.model,
            num_blocks=memory.num_blocks,
            max_model_len=engine.max_model_len,
        )
        if on_ready is not None:
            on_ready(running)

        async def drain() -> None:
            if publisher is not None:
                await publisher.close()
                # Routers look who is there once a second; what they send until then is served.
                await asyncio.sleep(config.notice_seconds)
            # Running requests need their pushes, and pulls need their leases: the server still takes calls.
            await servicer.drain()

        await serve_until_signal(server, drain, failure)


def _describe(registry: CollectorRegistry, thread: EngineThread, memory: KvMemory) -> None:
    """Let the metrics tell of the process, the engine and its blocks, as they are when they are asked for."""
    registry.register(EngineCollector(partial(ask_for_snapshot, thread)))
    ProcessCollector(registry=registry)
    CacheInfo(registry).describe(
        block_size=memory.shape.block_size,
        num_blocks=memory.num_blocks,
        block_bytes=memory.shape.block_bytes,
    )


def _services(
    servicer: WorkerServicer, receiver: KvTransferServicer, lender: KvPullServicer
) -> list[Service]:
    return [
        Service(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, WORKER_SERVICE),
        Service(kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server, receiver, KV_SERVICE),
        Service(kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server, lender, PULL_SERVICE),
    ]


def _reachable_address(config: WorkerConfig, server: GrpcServer) -> str:
    if config.redis_url is not None and config.host in WILDCARDS:
        return address_towards(config.redis_url, server.port)
    return server.address


def _identify(config: WorkerConfig, worker_id: str, model: LoadedModel, memory: KvMemory) -> WorkerIdentity:
    shape = memory.shape
    return WorkerIdentity(
        worker_id=worker_id,
        role=config.role,
        epoch=secrets.token_hex(8),
        model=config.model_name,
        model_path=config.model_path,
        layout=KvLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            block_size=shape.block_size,
            head_dim=shape.head_dim,
            dtype=str(shape.dtype).removeprefix("torch."),
            model_digest=model.digest,
        ),
        num_blocks=memory.num_blocks,
        max_model_len=longest_sequence(model, memory, config.max_model_len),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        request_timeout_seconds=config.request_timeout_seconds,
        cluster_secret=config.cluster_secret,
        index_stride=config.index_stride,
    )


def _read_tokenizer(model_path: str) -> str:
    return (load_model_files(model_path).folder / "tokenizer.json").read_text("utf-8")


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
