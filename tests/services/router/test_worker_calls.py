"""The worker calls of one attempt: their events, what a slow client gets, and how they are ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc.aio
import pytest

from quire.protos import inference_pb2, worker_pb2
from quire.services.router.execution.token_charge import AttemptCharge, RequestCharge
from quire.services.router.execution.worker_calls import MAX_JOINED_TOKENS, Event, WorkerCalls
from quire.services.router.workers.answer_part import AnswerPart
from quire.services.router.workers.worker import Worker, WorkerConnection
from tests.testing.router_parts import Spawned
from tests.testing.rpc_errors import rpc_error

WAIT_SECONDS = 5.0


class Outputs:
    """A stream of outputs that is open, and keeps its subscriber."""

    def __init__(self) -> None:
        self.receive: Any = None
        self.unsubscribed: list[worker_pb2.OutputChannel] = []

    def subscribe(self, receive: Any) -> worker_pb2.OutputChannel:
        self.receive = receive
        return worker_pb2.OutputChannel(stream_id="s", channel=1)

    def unsubscribe(self, channel: worker_pb2.OutputChannel) -> None:
        self.unsubscribed.append(channel)


class Connection:
    """A connection to a worker, which is its own stub and keeps the aborts that it is sent."""

    def __init__(self) -> None:
        self.stub = self
        self.aborts: list[worker_pb2.AbortRequest] = []
        self.outputs = Outputs()
        self.stranger: Exception | None = None
        self.abort_error: Exception | None = None
        self.num_generated_tokens = 0
        """What it says of an ended call."""

    async def check(self, call: Any) -> None:
        if self.stranger is not None:
            raise self.stranger

    def Abort(self, request: worker_pb2.AbortRequest, **options: Any) -> asyncio.Task[Any]:
        self.aborts.append(request)
        return asyncio.create_task(self._ended())

    async def _ended(self) -> worker_pb2.AbortResponse:
        if self.abort_error is not None:
            raise self.abort_error
        return worker_pb2.AbortResponse(num_generated_tokens=self.num_generated_tokens)


class Call:
    """A stream of numbers that ends, fails, or waits for ever."""

    def __init__(self, count: int, error: Exception | None = None, *, is_endless: bool = False) -> None:
        self._count, self._error, self._is_endless = count, error, is_endless
        self.num_read = 0
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in range(self._count):
            self.num_read += 1
            yield message
        if self._error is not None:
            raise self._error
        if self._is_endless:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


class Setup:
    """The calls of an attempt to workers that are not there."""

    def __init__(self) -> None:
        spawned = Spawned()
        self.spawned = spawned.tasks
        self.charged: list[int] = []
        self.charge = AttemptCharge(RequestCharge(self.charged.append, 0))
        self.calls = WorkerCalls("r", 3, spawned.spawn, self.charge)

    def worker(self, name: str) -> tuple[Worker, Connection]:
        connection = Connection()
        info = worker_pb2.GetWorkerInfoResponse(worker_id=name, role="decode")
        return Worker(f"{name}:1", info, cast(WorkerConnection, connection)), connection

    async def event(self) -> Event:
        return await asyncio.wait_for(self.calls.next(), WAIT_SECONDS)

    async def next(self) -> tuple[str, Any, Any]:
        event = await self.event()
        return event.worker.worker_id, event.message, event.error


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_each_call_keeps_its_order_and_has_one_end(setup: Setup) -> None:
    error = rpc_error(grpc.StatusCode.ABORTED)
    (a, asked_nothing), (b, asked) = setup.worker("a"), setup.worker("b")
    async with setup.calls as calls:
        calls.start(a, Call(3))
        calls.start(b, Call(2, error))
        events = [await setup.next() for _ in range(7)]
        assert calls.num_running == 0
        calls.has_all_outputs = True
    await asyncio.gather(*setup.spawned)
    assert (len(asked_nothing.aborts), len(asked.aborts)) == (0, 1), "only b did not say what it generated"
    assert [event[1:] for event in events if event[0] == "a"] == [
        (0, None),
        (1, None),
        (2, None),
        (None, None),
    ]
    assert [event[1:] for event in events if event[0] == "b"] == [(0, None), (1, None), (None, error)]


async def test_a_call_runs_until_its_end_was_seen(setup: Setup) -> None:
    async with setup.calls as calls:
        calls.start(setup.worker("a")[0], Call(1))
        for expected in (1, 1, 0):
            assert calls.num_running == expected
            if expected:
                await setup.next()


async def test_a_slow_client_gets_the_waiting_outputs_in_one_message(setup: Setup) -> None:
    worker, connection = setup.worker("a")
    async with setup.calls as calls:
        calls.subscribe(worker)
        for parts in (
            [AnswerPart([5], num_accepted_draft_tokens=1), AnswerPart([6], index=1)],
            [AnswerPart([7, 8], num_accepted_draft_tokens=2)],
            [AnswerPart([9], index=1, finish_reason=inference_pb2.FINISH_REASON_STOP)],
        ):
            connection.outputs.receive(parts)
        assert (await setup.event()).parts == [
            AnswerPart([5, 7, 8], num_accepted_draft_tokens=3),
            AnswerPart([6, 9], index=1, finish_reason=inference_pb2.FINISH_REASON_STOP),
        ]


async def test_a_message_takes_a_limited_number_of_tokens(setup: Setup) -> None:
    worker, connection = setup.worker("a")
    async with setup.calls as calls:
        calls.subscribe(worker)
        for token in range(MAX_JOINED_TOKENS + 1):
            connection.outputs.receive([AnswerPart([token])])
        parts = [(await setup.event()).parts for _ in range(2)]
    assert [len(part.token_ids) for [part] in filter(None, parts)] == [MAX_JOINED_TOKENS, 1]


async def test_outputs_of_a_stream_become_events_until_the_attempt_ends(setup: Setup) -> None:
    worker, connection = setup.worker("a")
    async with setup.calls as calls:
        channel = calls.subscribe(worker)
        assert channel == worker_pb2.OutputChannel(stream_id="s", channel=1)
        connection.outputs.receive([AnswerPart([5])])
        assert (await setup.event()).parts == [AnswerPart([5])]
        lost = rpc_error(grpc.StatusCode.UNAVAILABLE)
        connection.outputs.receive(lost)
        assert await setup.next() == ("a", None, lost)
        assert connection.outputs.unsubscribed == []
    assert connection.outputs.unsubscribed == [channel]


async def test_unfinished_calls_are_cancelled_and_aborted_at_the_end(setup: Setup) -> None:
    ended, (running, connection) = setup.worker("ended")[0], setup.worker("running")
    call = Call(1, is_endless=True)
    async with setup.calls as calls:
        calls.start(ended, Call(0))
        calls.start(running, call)
        for _ in range(2):
            await setup.next()
        calls.has_all_outputs = True
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


async def test_tokens_are_charged_when_they_arrive_and_the_rest_when_the_call_is_ended(setup: Setup) -> None:
    (streaming, streamed), (searching, searched) = setup.worker("streaming"), setup.worker("searching")
    streamed.num_generated_tokens, searched.num_generated_tokens = 5, 70
    async with setup.calls as calls:
        calls.start(streaming, Call(0, is_endless=True))
        calls.subscribe(streaming)
        streamed.outputs.receive([AnswerPart([5, 6])])
        assert setup.charged == [2], "no one has read the event"
        assert (await setup.event()).parts == [AnswerPart([5, 6])]
        calls.start(searching, Call(0, is_endless=True))
        calls.subscribe(searching)
        searched.outputs.receive([AnswerPart(num_generated_tokens=64)])
        assert setup.charged == [2, 64]
    await asyncio.gather(*setup.spawned)
    assert sorted(setup.charged[2:]) == [3, 6]


async def test_the_tokens_of_an_ended_call_are_charged_although_their_outputs_never_arrive(
    setup: Setup,
) -> None:
    worker, connection = setup.worker("a")
    connection.num_generated_tokens = 1600
    async with setup.calls as calls:
        calls.subscribe(worker)
        calls.start(worker, Call(0))
        connection.outputs.receive([AnswerPart([5] * 300)])
        while not (await setup.event()).is_end:
            pass
    await asyncio.gather(*setup.spawned)
    assert setup.charged == [300, 1300]


async def test_a_stranger_cannot_charge_tokens(setup: Setup) -> None:
    worker, connection = setup.worker("a")
    connection.num_generated_tokens = 2**31
    async with setup.calls as calls:
        calls.start(worker, Call(0, is_endless=True))
        await asyncio.sleep(0)
        connection.stranger = rpc_error(grpc.StatusCode.UNAUTHENTICATED)
    await asyncio.gather(*setup.spawned)
    assert setup.charged == []
