"""When a worker's health checks report that it can serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.worker_record import WorkerRecord
from quire.rpc.server import GrpcServer, grpc_server
from quire.services.worker.main import _report_readiness
from quire.services.worker.state import WorkerState
from tests.testing.memory_index import MemoryLease, MemoryStore
from tests.testing.until import until

SECONDS = 10.0


class FailingLease(MemoryLease):
    """A lease in an index that may refuse writes, as a Redis that is read-only or does not answer."""

    is_refused = True

    async def join(self, record: WorkerRecord) -> None:
        if self.is_refused:
            raise OSError("read-only")
        await super().join(record)

    async def beat(self) -> None:
        if self.is_refused:
            raise OSError("read-only")
        await super().beat()


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    async with grpc_server([], registry=CollectorRegistry(), grace_seconds=0) as running:
        yield running


async def test_a_worker_is_not_ready_while_its_engine_is_stalled(server: GrpcServer) -> None:
    state = WorkerState("decode")
    reporting = asyncio.create_task(_report_readiness(server, state, None))
    await until(lambda: server.health.is_ready)
    state.set_stalled(True)
    await until(lambda: not server.health.is_ready)
    state.set_stalled(False)
    await until(lambda: server.health.is_ready)
    reporting.cancel()


async def test_a_worker_is_ready_from_its_first_lease_on_even_if_it_loses_it(server: GrpcServer) -> None:
    lease, ledger = FailingLease(MemoryStore(), 30.0), PublishLedger()
    publisher = BlockPublisher(lease, ledger, asyncio.get_running_loop(), beat_seconds=0.01)
    publisher.start(WorkerRecord("d", "decode", "d:1", "epoch", "fingerprint"))
    state = WorkerState("decode")
    reporting = asyncio.create_task(_report_readiness(server, state, publisher))
    state.set_stalled(True)
    state.set_stalled(False)
    await asyncio.sleep(0)
    assert not server.health.is_ready
    lease.is_refused = False
    await until(lambda: server.health.is_ready and ledger.is_following)
    lease.is_refused = True
    await until(lambda: not ledger.is_following)
    assert server.health.is_ready
    reporting.cancel()
    await publisher.close()
