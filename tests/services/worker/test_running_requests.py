"""The requests that a worker serves: each is counted, freed and ended exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from quire.engine.engine_thread import EngineStoppedError
from quire.engine.errors import KvBudgetError
from quire.engine.sequences.sequence import Sequence
from quire.protos import worker_pb2
from quire.rpc.errors import AlreadyExists, InvalidArgument
from quire.sampling.params import SamplingParams
from quire.services.server.phases import PROMPT_PHASES, Phase, PhaseMetrics
from quire.services.server.tracing import NoTracer
from quire.services.worker.reports.request_loads import RequestLoads
from quire.services.worker.requests.running_requests import RunningRequests
from quire.services.worker.state import WorkerState


class Engine:
    """An engine's thread that keeps what it subscribes and aborts."""

    def __init__(self) -> None:
        self.subscribed: set[str] = set()
        self.aborted: list[str] = []
        self.is_stopped = False
        self.on_call: Callable[[], None] = lambda: None

    def is_subscribed(self, attempt_id: str) -> bool:
        return attempt_id in self.subscribed

    def subscribe(self, attempt_id: str, receive: Any) -> None:
        self.subscribed.add(attempt_id)

    def unsubscribe(self, attempt_id: str) -> None:
        self.subscribed.discard(attempt_id)

    async def call(self, command: Any) -> None:
        self.on_call()
        self.post(command)

    def post(self, command: Any) -> None:
        if self.is_stopped:
            raise EngineStoppedError("stopped")
        command(Mock(abort=self.aborted.append))


class Setup:
    """The requests of a worker, each in a task of its own."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.registry = CollectorRegistry()
        phases = PhaseMetrics(self.registry, PROMPT_PHASES)
        engine: Any = self.engine
        self.requests = RunningRequests(
            engine, WorkerState("decode"), phases, NoTracer(), RequestLoads(Mock())
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def serve(
        self,
        sequence_id: str,
        attempt: int = 0,
        error: Exception | None = None,
        num_generated: int = 0,
        sequences: list[Sequence] | None = None,
    ) -> None:
        """Serve a request until it is cancelled, or fail."""
        message = worker_pb2.Sequence(sequence_id=sequence_id, attempt=attempt)
        sequence = Sequence(f"{sequence_id}#{attempt}", [5], 1, SamplingParams(), b"")
        sequence.tally.num_generated_tokens = num_generated
        if sequences is not None:
            sequences.append(sequence)
        context = Mock(invocation_metadata=lambda: (), time_remaining=lambda: None)
        with self.requests.run("decode", message, sequence, context):
            if error is not None:
                raise error
            await asyncio.Event().wait()

    async def start(self, sequence_id: str, attempt: int = 0) -> asyncio.Task[None]:
        task = asyncio.create_task(self.serve(sequence_id, attempt))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_however_a_request_ends_the_engine_frees_all_of_it(setup: Setup) -> None:
    with pytest.raises(InvalidArgument, match="too small"):
        await setup.serve("a", error=KvBudgetError("too small"))
    task = await setup.start("b")
    assert (len(setup.requests), setup.engine.subscribed) == (1, {"b#0"})
    task.cancel()
    await asyncio.wait([task])
    assert (len(setup.requests), setup.engine.subscribed) == (0, set())
    assert setup.engine.aborted == ["a#0", "b#0"]


@pytest.mark.parametrize("is_embedding", [False, True])
async def test_phases_are_measured_except_those_of_embeddings(setup: Setup, is_embedding: bool) -> None:
    sequence = Sequence("a#0", [5], 1, SamplingParams(), b"")
    sequence.pooled = Mock() if is_embedding else None
    context = Mock(invocation_metadata=lambda: (), time_remaining=lambda: None)
    message = worker_pb2.Sequence(sequence_id="a")
    with setup.requests.run("prefill", message, sequence, context) as (_, phases):
        phases.record(Phase.PULL, 1.0, 2.0)
    name, labels = "quire_request_phase_seconds_count", {"phase": Phase.PULL.value}
    assert setup.registry.get_sample_value(name, labels) == (0 if is_embedding else 1)


async def test_a_request_ends_even_if_the_engine_has_stopped(setup: Setup) -> None:
    task = await setup.start("a")
    setup.engine.is_stopped = True
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(setup.requests) == 0


async def test_an_attempt_is_served_once(setup: Setup) -> None:
    task = await setup.start("a", 1)
    with pytest.raises(AlreadyExists, match="a#1"):
        await setup.serve("a", 1)
    assert setup.engine.subscribed == {"a#1"}, "the first one goes on"
    assert not task.done()
    await setup.start("a", 2)
    assert len(setup.requests) == 2


async def test_an_abort_ends_the_attempts_up_to_its_own(setup: Setup) -> None:
    tasks = [await setup.start("a", attempt) for attempt in range(3)]
    other = await setup.start("b", 0)
    await asyncio.wait_for(setup.requests.abort(["a", "unknown"], 1), 5)
    assert [task.done() for task in (*tasks, other)] == [True, True, False, False]
    assert sorted(setup.engine.aborted) == ["a#0", "a#1"], "nothing is left when the abort returns"


async def test_an_abort_returns_what_its_attempt_had_generated_when_it_was_ended(setup: Setup) -> None:
    running = [asyncio.create_task(setup.serve("a", attempt, None, 10 + attempt)) for attempt in range(2)]
    setup.tasks += running
    await asyncio.sleep(0)
    assert await setup.requests.abort(["a"], 1) == 11
    assert await setup.requests.abort(["a"], 1) == 0, "the count is given once"
    cancelled = asyncio.create_task(setup.serve("b", num_generated=7))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert await setup.requests.abort(["b"], 0) == 7, "the abort may come after the end"
    assert await setup.requests.abort(["unknown"], 0) == 0


async def test_an_abort_returns_what_an_attempt_generated_that_ended_by_itself(setup: Setup) -> None:
    sequence = Sequence("a#0", [5], 1, SamplingParams(), b"")
    context = Mock(invocation_metadata=lambda: (), time_remaining=lambda: None)
    with setup.requests.run("decode", worker_pb2.Sequence(sequence_id="a"), sequence, context):
        sequence.tally.num_generated_tokens = 5
    assert await setup.requests.abort(["a"], 0) == 5


async def test_an_abort_counts_the_step_that_ends_meanwhile(setup: Setup) -> None:
    sequences: list[Sequence] = []
    task = asyncio.create_task(setup.serve("a", sequences=sequences))
    await asyncio.sleep(0)

    def step() -> None:
        sequences[0].tally.num_generated_tokens += 3

    setup.engine.on_call = step
    assert await setup.requests.abort(["a"], 0) == 3
    await asyncio.wait([task])


@pytest.mark.parametrize(("priority", "remaining", "expected"), [(0, None, 10), (-3, 60.0, -20), (0, 2.0, 2)])
async def test_priority_and_deadline_move_a_request_in_the_engines_order(
    priority: int, remaining: float | None, expected: float
) -> None:
    sequence = Sequence("a#0", [5], 1, SamplingParams(), b"")
    context = Mock(invocation_metadata=lambda: (), time_remaining=lambda: remaining)
    message = worker_pb2.Sequence(sequence_id="a", priority=priority)
    with Setup().requests.run("decode", message, sequence, context):
        assert sequence.patience == expected
