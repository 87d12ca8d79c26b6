"""Keeps the requests that a worker serves, so that each can be aborted and counted."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.sequences.sequence import Sequence, Tally
from quire.fairness.patience import patience
from quire.protos import worker_pb2
from quire.rpc.ended_calls import end_calls
from quire.rpc.errors import Aborted, AlreadyExists
from quire.services.server.phases import PhaseMetrics, RequestPhases
from quire.services.server.tracing import Tracer
from quire.services.worker.reports.request_loads import RequestLoads
from quire.services.worker.requests.convert import attempt_id as id_of_attempt
from quire.services.worker.requests.engine_errors import known_errors
from quire.services.worker.requests.updates import Updates
from quire.services.worker.state import WorkerState

TALLY_SECONDS = 10.0
"""Seconds for which an ended attempt's tally is kept, since an ``abort`` may ask for it."""


class Running(NamedTuple):
    """A request that is being served here."""

    updates: Updates
    phases: RequestPhases


@dataclass(eq=False)
class RunningRequests:
    """The requests of one worker, each served by one task for each attempt."""

    engine: EngineThread
    state: WorkerState
    phases: PhaseMetrics
    tracer: Tracer
    loads: RequestLoads
    _handlers: defaultdict[str, dict[asyncio.Task[Any], int]] = field(
        default_factory=lambda: defaultdict(dict), init=False
    )
    """The attempt that each task serves, by request."""
    _tallies: dict[str, Tally] = field(default_factory=dict, init=False)
    """Those of attempts that have ended, by their ids.

    A router may stop reading before it has all outputs, so it also asks for attempts that ended by
    themselves.
    """

    def __len__(self) -> int:
        return sum(map(len, self._handlers.values()))

    @contextmanager
    def run(
        self,
        role: str,
        message: worker_pb2.Sequence,
        sequence: Sequence,
        context: Any,
        *,
        computes_prompt: bool = True,
    ) -> Iterator[Running]:
        """Register the handler for ``abort``. Free the request's blocks in the engine when the handler ends.

        Args:
            computes_prompt: whether the prompt is computed here, so that ``loads.record_computed`` follows.
        """
        attempt_id, sequence_id = sequence.attempt_id, message.sequence_id
        task = asyncio.current_task()
        assert task is not None
        self.state.check_not_stopping()
        sequence.patience = patience(message.priority, context.time_remaining())
        if self.engine.is_subscribed(attempt_id):
            raise AlreadyExists(f"request {attempt_id} is already here")
        self._handlers[sequence_id][task] = message.attempt
        load = self.loads.counted(
            attempt_id, message.load, is_resident=role == "decode", computes_prompt=computes_prompt
        )
        try:
            with (
                load,
                self.tracer.span(role, context.invocation_metadata()) as span,
                known_errors(sequence),
            ):
                span.set(quire__sequence_id=sequence_id, quire__attempt=message.attempt)
                updates = Updates()
                self.engine.subscribe(attempt_id, updates.put)
                phases = RequestPhases(self.phases if sequence.pooled is None else None, span)
                yield Running(updates, phases)
        finally:
            self._tallies[attempt_id] = sequence.tally
            task.get_loop().call_later(TALLY_SECONDS, self._tallies.pop, attempt_id, None)
            self.engine.unsubscribe(attempt_id)
            with suppress(EngineStoppedError):
                self.engine.post(lambda e: e.abort(attempt_id))
            del self._handlers[sequence_id][task]
            if not self._handlers[sequence_id]:
                del self._handlers[sequence_id]

    async def abort(self, sequence_ids: Iterable[str], attempt: int) -> int:
        """End all attempts of the requests up to this one, and wait until they have ended.

        Returns:
            The number of tokens that this attempt of each generated, if it runs or has ended recently.
        """
        tasks = [
            task
            for sequence_id in sequence_ids
            for task, its_attempt in self._handlers.get(sequence_id, {}).items()
            if its_attempt <= attempt
        ]
        await end_calls(tasks, Aborted("the request was aborted"))
        ended = (self._tallies.pop(id_of_attempt(each, attempt), None) for each in sequence_ids)
        if not (tallies := [tally for tally in ended if tally is not None]):
            return 0
        with suppress(EngineStoppedError):
            # The step during which they ended counts too; this runs after it.
            await self.engine.call(lambda engine: None)
        return sum(tally.num_generated_tokens for tally in tallies)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that serve requests now."""
        return [task for handlers in self._handlers.values() for task in handlers]
