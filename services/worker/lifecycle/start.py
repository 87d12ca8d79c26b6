"""The parts that the steps of a worker's start share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from quire.engine.engine_thread import EngineStoppedError
from quire.kvindex.publisher import BlockPublisher
from quire.services.worker.config import WorkerConfig
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.lifecycle.kv_events import open_events
from quire.services.worker.lifecycle.membership import open_publisher
from quire.services.worker.lifecycle.models import Models
from quire.services.worker.state import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The parts of a worker that each step of its start may use.

    Attributes:
        publisher: publishes the worker and its blocks in Redis; None: no router finds the worker by itself.
        events: publishes the blocks to gateways; None: that was not asked for.
        address: host:port at which others reach the worker, once the server is bound.
        metrics_port: port of the worker's metrics, once it is bound.
        failure: gets the error of an engine that fails or is given up.
        stack: undoes the steps in reverse order.
    """

    config: WorkerConfig
    models: Models
    identity: WorkerIdentity
    registry: CollectorRegistry
    publisher: BlockPublisher | None
    events: BlockPublisher | None
    address: asyncio.Future[str]
    metrics_port: asyncio.Future[int]
    failure: asyncio.Future[EngineStoppedError]
    state: WorkerState
    stack: AsyncExitStack


def begin(config: WorkerConfig, models: Models, identity: WorkerIdentity, stack: AsyncExitStack) -> Start:
    """Open the worker's connections to its indexes, and prepare the parts that become known later."""
    loop, registry = asyncio.get_running_loop(), CollectorRegistry()
    return Start(
        config=config,
        models=models,
        identity=identity,
        registry=registry,
        publisher=open_publisher(config, registry, stack),
        events=open_events(config, identity, stack),
        address=loop.create_future(),
        metrics_port=loop.create_future(),
        failure=loop.create_future(),
        state=WorkerState(config.role),
        stack=stack,
    )
