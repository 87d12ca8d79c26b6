"""The worker calls of one attempt: their events, the wait for a slow client, and how they are ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from quire.protos import worker_pb2
from quire.services.router.worker import Worker, WorkerConnection
from quire.services.router.worker_calls import QUEUE_SIZE, WorkerCalls

WAIT_SECONDS = 5.0


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "scripted", "")


class Connection:
    """A connection to a worker, which is its own stub and keeps the aborts that it is sent."""

    def __init__(self) -> None:
        self.stub = self
        self.aborts: list[worker_pb2.AbortRequest] = []
        self.stranger: Exception | None = None
        self.abort_error: Exception | None = None

    async def check(self, call: Any) -> None:
        if self.stranger is not None:
            raise self.stranger

    async def Abort(self, request: worker_pb2.AbortRequest, **options: Any) -> None:
        self.aborts.append(request)
        if self.abort_error is not None:
            raise self.abort_error


class Call:
    """A stream of numbers that ends, fails, or waits for ever."""

    def __init__(self, count: int, error: Exception | None = None, *, is_endless: bool = False) -> None:
        self._count, self._error, self._is_endless = count, error, is_endless
        self.num_read = 0
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(self._count):
            self.num_read += 1
            yield number
        if self._error is not None:
            raise self._error
        if self._is_endless:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


class Setup:
    """The calls of an attempt to workers that are not there."""

    def __init__(self) -> None:
        self.spawned: list[asyncio.Task[None]] = []
        self.calls = WorkerCalls("r", 3, self._spawn)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.spawned.append(asyncio.create_task(coroutine))
        return self.spawned[-1]

    def worker(self, name: str) -> tuple[Worker, Connection]:
        connection = Connection()
        info = worker_pb2.GetWorkerInfoResponse(worker_id=name, role="decode")
        return Worker(f"{name}:1", info, cast(WorkerConnection, connection)), connection

    async def next(self) -> tuple[str, Any, Any]:
        event = await asyncio.wait_for(self.calls.next(), WAIT_SECONDS)
        return event.worker.worker_id, event.message, event.error


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_each_call_keeps_its_order_and_has_one_end(setup: Setup) -> None:
    error = rpc_error(grpc.StatusCode.ABORTED)
    async with setup.calls as calls:
        calls.start(setup.worker("a")[0], Call(3))
        calls.start(setup.worker("b")[0], Call(2, error))
        events = [await setup.next() for _ in range(7)]
        assert calls.num_running == 0
    assert [event[1:] for event in events if event[0] == "a"] == [
        (0, None),
        (1, None),
        (2, None),
        (None, None),
    ]
    assert [event[1:] for event in events if event[0] == "b"] == [(0, None), (1, None), (None, error)]
    assert setup.spawned == [], "there is nothing to abort"


async def test_a_call_runs_until_its_end_was_seen(setup: Setup) -> None:
    async with setup.calls as calls:
        calls.start(setup.worker("a")[0], Call(1))
        for expected in (1, 1, 0):
            assert calls.num_running == expected
            if expected:
                await setup.next()


async def test_a_worker_waits_for_a_slow_client(setup: Setup) -> None:
    call = Call(10 * QUEUE_SIZE)
    async with setup.calls as calls:
        calls.start(setup.worker("a")[0], call)
        for _ in range(20 * QUEUE_SIZE):
            await asyncio.sleep(0)
        assert call.num_read == QUEUE_SIZE + 1
        await setup.next()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert call.num_read == QUEUE_SIZE + 2


async def test_leaving_cancels_and_aborts_what_has_not_ended(setup: Setup) -> None:
    ended, (running, connection) = setup.worker("ended")[0], setup.worker("running")
    call = Call(1, is_endless=True)
    async with setup.calls as calls:
        calls.start(ended, Call(0))
        calls.start(running, call)
        for _ in range(2):
            await setup.next()
    assert call.is_cancelled
    await asyncio.gather(*setup.spawned)
    assert connection.aborts == [worker_pb2.AbortRequest(sequence_ids=["r"], attempt=3)]
    assert len(setup.spawned) == 1


async def test_a_worker_that_does_not_answer_the_abort_is_let_go(setup: Setup) -> None:
    worker, connection = setup.worker("a")
    connection.abort_error = rpc_error(grpc.StatusCode.UNAVAILABLE)
    async with setup.calls as calls:
        calls.start(worker, Call(0, is_endless=True))
    assert await asyncio.gather(*setup.spawned, return_exceptions=True) == [None]


async def test_nothing_that_a_stranger_sends_is_an_event(setup: Setup) -> None:
    worker, connection = setup.worker("a")
    connection.stranger = rpc_error(grpc.StatusCode.UNAUTHENTICATED)
    call = Call(3)
    async with setup.calls as calls:
        calls.start(worker, call)
        assert await setup.next() == ("a", None, connection.stranger)
    assert call.num_read == 0


async def test_a_call_on_a_closed_channel_has_lost_its_worker(setup: Setup) -> None:
    async with setup.calls as calls:
        calls.start(setup.worker("a")[0], Call(0, grpc.aio.UsageError("Channel is closed.")))
        _, message, error = await setup.next()
    assert message is None
    assert error.code() is grpc.StatusCode.UNAVAILABLE
