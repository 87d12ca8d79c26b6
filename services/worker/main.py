"""Serves one worker: reads its settings, builds its parts, and serves the services that are handed in."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import torch

from quire.engine.engine_thread import EngineStoppedError
from quire.kvindex.publisher import BlockPublisher
from quire.rpc.freed_buffers import keep_freed_buffers
from quire.rpc.server import GrpcServer, Service, Stop, serve_until_signal, tell_log
from quire.services.server.background import in_background
from quire.services.server.log import configure_logging, get_logger
from quire.services.server.loop_lag import LoopLagMetrics, loop_lag_observed
from quire.services.server.metrics_server import Probes, metrics_server
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.lifecycle.build import identify, load_models
from quire.services.worker.lifecycle.drain import drain_before_exit
from quire.services.worker.parts import WorkerParts
from quire.services.worker.start import (
    Start,
    assemble_parts,
    begin,
    pull_service,
    reachable_address,
    start_engine,
    worker_server,
)
from quire.services.worker.state import WorkerState

Compose = Callable[[WorkerConfig, WorkerParts], Awaitable[Sequence[Service]]]
"""Makes the services that use a worker's parts; a process hands in those of its choice."""

_log = get_logger("worker")


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
    models = await asyncio.to_thread(load_models, config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, models.close)
        identity = identify(config, worker_id, models)
        start = begin(config, models, identity, stack)
        engine = await start_engine(start)
        lag = await stack.enter_async_context(loop_lag_observed(LoopLagMetrics(start.registry)))
        parts = await assemble_parts(start, engine)
        services = [*await compose(config, parts), await pull_service(parts, stack)]
        server = await stack.enter_async_context(worker_server(start, services))
        server.call_before_end(parts.outputs.close)
        server.call_before_end(parts.reports.close)
        start.address.set_result(reachable_address(config, server))
        metrics_port = stack.enter_context(
            metrics_server(start.registry, Probes(server, lag), config.host, config.metrics_port)
        )
        await _join(start)
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


async def _join(start: Start) -> None:
    """Publish the worker and its blocks, until it stops or its engine fails."""
    if (publisher := start.publisher) is None:
        return
    record = partial(start.identity.record, start.address.result(), start.state)
    publisher.start(record())
    start.state.call_on_change(lambda: publisher.announce(record()))
    start.stack.push_async_callback(publisher.close)
    await start.stack.enter_async_context(in_background(_leave_on_failure(publisher, start.failure)))


async def _report_readiness(server: GrpcServer, state: WorkerState, publisher: BlockPublisher | None) -> None:
    """Report SERVING while the engine makes progress, from the first lease on, until cancelled.

    Before its first lease no router finds the worker. Later routers keep it without one.
    """
    if publisher is not None:
        await publisher.has_joined.wait()
    has_changed = asyncio.Event()
    state.call_on_change(has_changed.set)
    while True:
        has_changed.clear()
        await (server.not_ready() if state.is_stalled else server.ready())
        await has_changed.wait()


def _log_ready(start: Start) -> None:
    address = start.address.result()
    _log.info("worker_ready", role=start.state.role, address=address, blocks=start.identity.num_blocks)
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


async def _leave_on_failure(publisher: BlockPublisher, failure: asyncio.Future[EngineStoppedError]) -> None:
    """Give up the lease at once: the calls of a failed worker may take a while to end."""
    await asyncio.wait([failure])
    await publisher.close()
