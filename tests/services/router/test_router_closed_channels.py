"""A worker that leaves takes its channel with it; what still speaks to it ends like any failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.protos import admin_pb2, kvtransfer_pb2, worker_pb2, worker_pb2_grpc
from quire.rpc.errors import Unavailable
from quire.rpc.server import Service, grpc_server
from quire.services.router.admin.admin import AdminServicer
from quire.services.router.execution.worker_calls import WorkerCalls
from quire.services.router.migration.block_copies import FAILED, copy_blocks
from quire.services.router.workers.membership import StaticMembership
from quire.services.router.workers.worker import Worker, WorkerConnection
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.background import background
from tests.testing.decodes import StreamingWorker
from tests.testing.router_parts import Spawned, free_charge


class SilentWorker(StreamingWorker):
    """Takes calls and never answers, but for who it is."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:
        return worker_pb2.GetWorkerInfoResponse(
            worker_id="silent", role="prefill", epoch="1", layout=kvtransfer_pb2.KvLayout(block_size=4)
        )

    async def _wait(self, request: Any, context: Any) -> None:
        self.begun.set()
        await asyncio.Event().wait()

    CopyBlocks = Abort = ClearCache = _wait

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.DecodeResponse]:
        yield worker_pb2.DecodeResponse(accepted=worker_pb2.Accepted())
        await self._wait(request, context)


@pytest.fixture
def spawned() -> Spawned:
    return Spawned()


@pytest.fixture
async def silent() -> AsyncIterator[tuple[SilentWorker, Worker, WorkerSet]]:
    """The worker on its server, what the router knows of it, and the router's set of workers."""
    servicer = SilentWorker()
    service = Service(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, "quire.v1.WorkerService")
    async with grpc_server([service], registry=CollectorRegistry(), grace_seconds=0) as server:
        await server.ready()
        workers = WorkerSet(StaticMembership([server.address]))
        await workers.refresh()
        (worker,) = workers.all()
        yield servicer, worker, workers
        await workers.close()


async def close(connection: WorkerConnection) -> None:
    await connection.channel.close(grace=None)


def copy(worker: Worker) -> Coroutine[Any, Any, worker_pb2.PullSummary]:
    time = worker_pb2.COPY_TIME_NOW
    return copy_blocks(worker, worker, list(range(9)), worker_pb2.CacheScope(), time=time, seconds=10)


@pytest.mark.parametrize("is_under_way", [False, True])
async def test_a_copy_whose_channel_is_closed_failed(
    silent: tuple[SilentWorker, Worker, WorkerSet], is_under_way: bool
) -> None:
    servicer, worker, _ = silent
    if not is_under_way:
        await close(worker.connection)
    copying = asyncio.create_task(copy(worker))
    if is_under_way:
        await servicer.begun.wait()
        await close(worker.connection)
    assert (await copying).failure == FAILED


@pytest.mark.parametrize("is_under_way", [False, True])
async def test_an_abort_whose_channel_is_closed_is_done(
    silent: tuple[SilentWorker, Worker, WorkerSet], spawned: Spawned, is_under_way: bool
) -> None:
    servicer, worker, _ = silent
    async with WorkerCalls("r", 0, spawned.spawn, free_charge()) as calls:
        calls.start(worker, worker.stub.Decode(worker_pb2.DecodeRequest()))
        await calls.next()
        await servicer.begun.wait()
        servicer.begun.clear()
    if is_under_way:
        await servicer.begun.wait()
    await close(worker.connection)
    assert await asyncio.gather(*spawned.tasks, return_exceptions=True) == [None]


async def test_a_worker_call_whose_channel_is_closed_ends(
    silent: tuple[SilentWorker, Worker, WorkerSet], spawned: Spawned
) -> None:
    servicer, worker, _ = silent
    async with asyncio.timeout(10), WorkerCalls("r", 0, spawned.spawn, free_charge()) as calls:
        calls.start(worker, worker.stub.Decode(worker_pb2.DecodeRequest()))
        await calls.next()
        await servicer.begun.wait()
        await close(worker.connection)
        event = await calls.next()
        assert event.message is None
        assert event.error is not None
        assert event.error.code() is grpc.StatusCode.UNAVAILABLE
        assert calls.num_running == 0


async def test_the_operator_gets_an_error_that_the_worker_has_left(
    silent: tuple[SilentWorker, Worker, WorkerSet],
) -> None:
    servicer, worker, workers = silent
    request = admin_pb2.ClearWorkerCachesRequest()
    clearing = asyncio.create_task(AdminServicer(workers, Mock(), {}, "").ClearWorkerCaches(request, None))
    await servicer.begun.wait()
    await close(worker.connection)
    with pytest.raises(Unavailable, match="worker silent has left"):
        await clearing


async def test_a_cancelled_copy_is_cancelled_still(silent: tuple[SilentWorker, Worker, WorkerSet]) -> None:
    servicer, worker, _ = silent
    copying = asyncio.create_task(copy(worker))
    await servicer.begun.wait()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying


async def test_failures_in_the_background_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with background() as spawn:
        failing = spawn(AsyncMock(side_effect=OSError("lost"))())
    assert failing.done()
    assert [record.getMessage() for record in caplog.records] == ["background_failed"]
