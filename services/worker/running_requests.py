"""Keeps the requests that a worker serves, so that each can be aborted, counted and waited for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.sequence import Sequence
from quire.protos import worker_pb2
from quire.services.server.ended_calls import end_call
from quire.services.server.errors import DRAINING, Aborted, AlreadyExists, ServiceError, Unavailable
from quire.services.server.phases import PhaseMetrics, RequestPhases
from quire.services.server.tracing import Tracer
from quire.services.worker.drain import Drain
from quire.services.worker.engine_errors import known_errors
from quire.services.worker.updates import Updates

END_SECONDS = 1.0
"""How long requests that are ended may take to tell their callers."""


class Running(NamedTuple):
    """A request that is being served here."""

    updates: Updates
    phases: RequestPhases


class RunningRequests:
    """The requests of one worker, each served by one task for each attempt."""

    def __init__(self, engine: EngineThread, drain: Drain, phases: PhaseMetrics, tracer: Tracer) -> None:
        self._engine = engine
        self._drain = drain
        self._phases = phases
        self._tracer = tracer
        self._handlers: defaultdict[str, dict[asyncio.Task[Any], int]] = defaultdict(dict)
        """The attempt that each task serves, by request."""

    def __len__(self) -> int:
        return sum(map(len, self._handlers.values()))

    @contextmanager
    def run(
        self, role: str, message: worker_pb2.Sequence, sequence: Sequence, context: Any
    ) -> Iterator[Running]:
        """Register the handler for ``abort``; at its end, however it ends, free what the engine holds."""
        attempt_id, sequence_id = sequence.attempt_id, message.sequence_id
        task = asyncio.current_task()
        assert task is not None
        if self._drain.is_stopping:
            raise Unavailable("this worker is stopping; send requests to another", reason=DRAINING)
        if self._engine.is_subscribed(attempt_id):
            raise AlreadyExists(f"request {attempt_id} is already here")
        self._handlers[sequence_id][task] = message.attempt
        try:
            with self._tracer.span(role, context.invocation_metadata()) as span, known_errors(sequence):
                span.set(quire__sequence_id=sequence_id, quire__attempt=message.attempt)
                yield Running(self._engine.subscribe(attempt_id), RequestPhases(self._phases, span))
        finally:
            self._engine.unsubscribe(attempt_id)
            with suppress(EngineStoppedError):
                self._engine.post(lambda e: e.abort(attempt_id))
            del self._handlers[sequence_id][task]
            if not self._handlers[sequence_id]:
                del self._handlers[sequence_id]

    async def abort(self, sequence_ids: Iterable[str], attempt: int) -> None:
        """End the requests' attempts up to this one, and wait until nothing of them is left."""
        tasks = [
            task
            for sequence_id in sequence_ids
            for task, its_attempt in self._handlers.get(sequence_id, {}).items()
            if its_attempt <= attempt
        ]
        await _end(tasks, Aborted("the request was aborted"))

    async def drain(self) -> None:
        """Refuse requests from now on, and wait until those that run have ended."""
        self._drain.stop()
        while tasks := self._tasks:
            await asyncio.wait(tasks)

    async def end(self) -> None:
        """End the requests that still run, with a status that says that this worker stops.

        A connection that is cut would look like a worker that one of them has ended.
        """
        self._drain.stop()
        stopping = Unavailable("this worker stops; its time to drain is over", reason=DRAINING)
        await _end(self._tasks, stopping, END_SECONDS)

    @property
    def _tasks(self) -> list[asyncio.Task[Any]]:
        return [task for handlers in self._handlers.values() for task in handlers]


async def _end(tasks: list[asyncio.Task[Any]], error: ServiceError, seconds: float | None = None) -> None:
    """End calls with an error, and wait until nothing of them is left, or for some seconds."""
    for task in tasks:
        end_call(task, error)
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
