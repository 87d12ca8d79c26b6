"""Merges the worker calls of one attempt of a request into one stream of events."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import grpc

from quire.protos import worker_pb2
from quire.rpc.channels import ChannelClosedError, closed_channel_errors
from quire.services.router.execution.token_charge import AttemptCharge
from quire.services.router.workers.answer_part import AnswerPart
from quire.services.router.workers.output_reader import OutputReader, unavailable
from quire.services.router.workers.worker import Worker
from quire.services.server.background import Spawn
from quire.services.server.log import EventLogger

MAX_JOINED_TOKENS = 1024
"""Parts are joined until they have this many tokens; with 20 logprobs each these are 0.2 MB."""
ABORT_SECONDS = 10.0
"""Longest wait for a worker's count of the tokens of an ended call, which it knows after its present step."""

_log = EventLogger("router")


def connection_lost() -> grpc.aio.AioRpcError:
    """Return the error, with status UNAVAILABLE, of a call to a worker that was removed."""
    return unavailable("the worker was given up")


class NextWorker(NamedTuple):
    """The decode worker that an answer moves to, and how many of its leading tokens are cached there."""

    worker: Worker
    num_cached_tokens: int


class AttemptMoved(Exception):
    """The attempt must end, so that the next one continues on another worker."""

    def __init__(self, next_worker: NextWorker) -> None:
        self.next_worker = next_worker
        super().__init__(next_worker.worker.worker_id)


class Event(NamedTuple):
    """One event of a worker call: a message, parts of answers, an error, or, if all are None, its end."""

    worker: Worker
    message: Any = None
    parts: list[AnswerPart] | None = None
    error: grpc.aio.AioRpcError | None = None
    ends_call: bool = False

    @property
    def is_end(self) -> bool:
        """Whether the call has ended without an error."""
        return self.message is None and self.parts is None and self.error is None


class _RunningCall(NamedTuple):
    worker: Worker
    call: Any
    pump: asyncio.Task[None]


class WorkerCalls:
    """Runs the worker calls of one attempt; on exit, calls that have not ended are aborted.

    Each generated token is charged when the router learns of it, even if nothing reads the event.

    Attributes:
        has_all_outputs: whether no output is missing that a worker has generated; the caller sets it.

    Its queue of events has no limit, because a stream carries the outputs of many requests and must not wait
    for one of them. The maximum length of an answer limits it, and so does the time within which a client has
    to read.
    """

    def __init__(self, sequence_id: str, attempt: int, spawn: Spawn, charge: AttemptCharge) -> None:
        self._sequence_id = sequence_id
        self._attempt = attempt
        self._spawn = spawn
        self._charge = charge
        self._events: deque[Event] = deque()
        self._has_event = asyncio.Event()
        self._running: dict[str, _RunningCall] = {}
        self._ended: list[Event] = []
        """The ends of calls."""
        self.has_all_outputs = False
        self._subscriptions: list[tuple[OutputReader, worker_pb2.OutputChannel]] = []
        self._next_worker: NextWorker | None = None

    def move(self, next_worker: NextWorker) -> None:
        """Make ``next`` raise AttemptMoved once it has returned all events that have arrived."""
        self._next_worker = next_worker
        self._has_event.set()

    def subscribe(self, worker: Worker) -> worker_pb2.OutputChannel:
        """Return a channel of the worker's stream whose outputs become events."""
        reader = worker.connection.outputs
        channel = reader.subscribe(partial(self._receive, worker))
        self._subscriptions.append((reader, channel))
        return channel

    def start(self, worker: Worker, call: Any) -> None:
        """Begin to read the messages of a streaming call to a worker."""
        pump = asyncio.create_task(self._pump(worker, call))
        self._running[worker.worker_id] = _RunningCall(worker, call, pump)

    @property
    def num_running(self) -> int:
        """Number of worker calls whose end or error ``next`` has not returned yet."""
        return len(self._running)

    async def next(self) -> Event:
        """Wait for and return the next event of any worker call; parts that have arrived are joined.

        Raises:
            AttemptMoved: see ``move``.
        """
        while not self._events:
            if self._next_worker is not None:
                raise AttemptMoved(self._next_worker)
            self._has_event.clear()
            await self._has_event.wait()
        event = self._events.popleft()
        if event.ends_call:
            self._running.pop(event.worker.worker_id)
            self._ended.append(event)
        elif event.parts is not None and self._events and self._events[0].parts is not None:
            return self._joined(event.worker, event.parts)
        return event

    def _joined(self, worker: Worker, parts: list[AnswerPart]) -> Event:
        """Return an event with these parts and those of the next events, joined for each sequence."""
        joined: dict[int, AnswerPart] = {}
        num_tokens = 0
        while True:
            for part in parts:
                num_tokens += len(part.token_ids)
                if (earlier := joined.setdefault(part.index, part)) is not part:
                    earlier.extend(part)
            if num_tokens >= MAX_JOINED_TOKENS or not self._events or self._events[0].parts is None:
                return Event(worker, parts=list(joined.values()))
            parts = self._events.popleft().parts or []

    def _receive(self, worker: Worker, outputs: list[AnswerPart] | grpc.aio.AioRpcError) -> None:
        if isinstance(outputs, grpc.aio.AioRpcError):
            # The call itself may still run.
            self._add(Event(worker, error=outputs))
            return
        for part in outputs:
            if part.num_generated_tokens:
                self._charge.raise_to(worker.worker_id, part.num_generated_tokens)
            else:
                self._charge.add(worker.worker_id, len(part.token_ids))
        self._add(Event(worker, parts=[part for part in outputs if part.token_ids or part.finish_reason]))

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._has_event.set()

    async def __aenter__(self) -> WorkerCalls:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._running.values():
            each.call.cancel()
            each.pump.cancel()
            # Cancelling the call has the same effect, but the worker then cannot report its generated tokens.
            self._spawn(self._abort(each.worker))
        if not self._charge.is_repeated:
            for end in self._ended:
                # A failed call did not say how much it generated. After another, outputs may be on their way.
                if end.error is not None or not self.has_all_outputs:
                    self._spawn(self._abort(end.worker))
        for reader, channel in self._subscriptions:
            reader.unsubscribe(channel)
        await asyncio.gather(*(each.pump for each in self._running.values()), return_exceptions=True)

    async def _pump(self, worker: Worker, call: Any) -> None:
        try:
            with closed_channel_errors():
                await worker.connection.check(call)
                async for message in call:
                    if isinstance(message, worker_pb2.PrefillResponse):
                        self._charge.raise_to(worker.worker_id, message.num_generated_tokens)
                    self._add(Event(worker, message))
            self._add(Event(worker, ends_call=True))
        except ChannelClosedError:
            self._add(Event(worker, error=connection_lost(), ends_call=True))
        except grpc.aio.AioRpcError as error:
            self._add(Event(worker, error=error, ends_call=True))

    async def _abort(self, worker: Worker) -> None:
        request = worker_pb2.AbortRequest(sequence_ids=[self._sequence_id], attempt=self._attempt)
        try:
            with closed_channel_errors():
                call = worker.stub.Abort(request, timeout=ABORT_SECONDS)
                await worker.connection.check(call)
                ended = await call
            self._charge.raise_to(worker.worker_id, ended.num_generated_tokens)
        except (grpc.aio.AioRpcError, ChannelClosedError) as error:
            # A worker that does not answer either notices the lost connection or is dead.
            _log.debug("abort_failed", worker=worker.worker_id, error=error)
