"""Makes a worker a member of the cluster: it keeps a lease in Redis and publishes its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from quire.engine.engine_thread import EngineStoppedError
from quire.kvindex.instrumented_index import InstrumentedLease, PublisherMetrics
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.services.server.background import in_background
from quire.services.worker.config import WorkerConfig
from quire.services.worker.state import WorkerState


def open_publisher(
    config: WorkerConfig, registry: CollectorRegistry, stack: AsyncExitStack
) -> BlockPublisher | None:
    """Connect to Redis, if it is configured; nothing is published before ``join``."""
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


async def join(
    publisher: BlockPublisher,
    record: Callable[[], WorkerRecord],
    state: WorkerState,
    failure: asyncio.Future[EngineStoppedError],
    stack: AsyncExitStack,
) -> None:
    """Publish the worker and its blocks, until the stack is closed or the engine fails.

    Args:
        record: returns the cluster's record of the worker, which is published again when the state changes.
    """
    publisher.start(record())
    state.call_on_change(lambda: publisher.announce(record()))
    stack.push_async_callback(publisher.close)
    await stack.enter_async_context(in_background(_leave_on_failure(publisher, failure)))


async def _leave_on_failure(publisher: BlockPublisher, failure: asyncio.Future[EngineStoppedError]) -> None:
    """Give up the lease immediately, since the calls of a failed worker may end much later."""
    await asyncio.wait([failure])
    await publisher.close()
