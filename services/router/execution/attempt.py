"""Runs one attempt of a request on its chosen workers: the call to D, the call to P, and their order.

D is the decode worker and P the prefill worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, suppress
from typing import Any

import grpc.aio

from quire.protos import worker_pb2
from quire.routing.placement import Placement
from quire.services.router.execution.failures import WorkerCallFailed
from quire.services.router.execution.request_account import RequestAccount
from quire.services.router.execution.token_charge import AttemptCharge
from quire.services.router.execution.worker_calls import (
    AttemptMoved,
    Event,
    NextWorker,
    WorkerCalls,
    connection_lost,
)
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.router.workers.answer_part import AnswerPart, part_of_tokens
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.background import Spawn

CALL_END_SECONDS = 0.5
"""Longest time that a request waits for a worker call to end: for P's summary of the push, or for the failure
that caused an abort or the end of a stream of outputs."""
MIN_PULL_SECONDS = 0.5
"""Time limit of a pull, to which twice its expected time is added."""


class Attempt:
    """One attempt of a group of answers: its workers, and its calls to them.

    Attributes:
        group: the answers, which grow during the attempt.
        decode: D.
        prefill: P; None: D computes the prompt.
        scope: which requests may share its blocks.
        num_pushed: number of blocks that P has pushed to D.

    Args:
        workers: find the workers that the placement names, and count the load of the attempt.
        spawn: starts a coroutine that may outlive the attempt.
        sequence: the prompt, the tokens already sent, and the parameters.
        account: records what the calls report.
    """

    def __init__(
        self,
        workers: WorkerSet,
        spawn: Spawn,
        placement: Placement,
        group: AnswerGroup,
        sequence: worker_pb2.Sequence,
        account: RequestAccount,
    ) -> None:
        serving = {worker.worker_id: worker for worker in workers.serving()}
        self.group = group
        self.decode = serving[placement.decode.worker_id]
        self.prefill = serving[placement.prefill.worker_id] if placement.prefill else None
        self.scope = sequence.cache_scope
        self.num_pushed = 0
        self._pull_from: worker_pb2.PullSource | None = None
        """Where the worker that computes the prompt first copies blocks from; None: nowhere."""
        if (peer := placement.estimate.peer) is not None:
            source, pull_seconds = serving[peer.worker_id], placement.estimate.pull_seconds
            self._pull_from = worker_pb2.PullSource(
                address=source.peer_address,
                epoch=source.info.epoch,
                num_blocks=peer.num_blocks,
                timeout_ms=int(1000 * (MIN_PULL_SECONDS + 2 * pull_seconds)),
            )
        self._workers = workers
        self._placement = placement
        self._sequence = sequence
        self._account = account
        account.record_workers(each.label for each in (self.prefill, self.decode) if each is not None)
        self._charge = AttemptCharge(account.charge)
        self._calls = WorkerCalls(group.sequence_id, group.attempt, spawn, self._charge)
        self._early: deque[Event] = deque()
        """Events of D that arrived before its acceptance or P's first token."""

    def move(self, next_worker: NextWorker) -> None:
        """End the attempt once its received outputs were passed on; the next one runs on this worker."""
        self._calls.move(next_worker)

    async def outputs(
        self, followers: Iterable[Follower], remaining_seconds: Callable[[], float]
    ) -> AsyncGenerator[list[AnswerPart], None]:
        """Make the calls, and yield the parts of the answers as they arrive.

        Args:
            followers: follow the attempt until it ends.
            remaining_seconds: returns the time left for a call, or raises DeadlineExceeded.

        Raises:
            WorkerCallFailed: a call failed; the failure that caused the others, as far as it is known.
            AttemptMoved: the attempt ended so that the next one continues on another worker.
        """
        with ExitStack() as stack:
            heard = [stack.enter_context(follow(self)) for follow in (Attempt._count_load, *followers)]
            listeners = [on_parts for on_parts in heard if on_parts is not None]
            async with self._calls, aclosing(self._parts(remaining_seconds)) as outputs:
                try:
                    async for parts in outputs:
                        self._charge.keep(sum(len(part.token_ids) for part in parts))
                        yield parts
                        for on_parts in listeners:
                            on_parts()
                except WorkerCallFailed as failure:
                    cause = await self._cause(failure)
                    if cause.is_retryable:
                        self._charge.repeat()
                    raise cause from failure
                except AttemptMoved:
                    self._charge.repeat()
                    raise

    @contextmanager
    def _count_load(self) -> Iterator[OnParts]:
        """Count the tokens on the workers; once an answer grows, its prompt has been computed."""
        resident, pending = self._placement.resident_tokens, self._placement.pending_tokens
        dispatched, tenant = self._workers.dispatched, self._sequence.cache_scope.tenant
        if self.prefill is None:
            with dispatched(
                self.decode, tenant, pending_tokens=pending, resident_tokens=resident
            ) as computed:
                yield computed
            return
        with (
            dispatched(self.decode, resident_tokens=resident),
            dispatched(self.prefill, tenant, pending_tokens=pending) as computed,
        ):
            yield computed

    async def _parts(self, remaining_seconds: Callable[[], float]) -> AsyncGenerator[list[AnswerPart], None]:
        """Yield P's first token, if there is a P, then D's outputs."""
        decode, prefill, metadata = self.decode, self.prefill, self._account.phases.span.metadata
        to_decode = worker_pb2.DecodeRequest(
            sequence=self._sequence,
            remote_prefill=prefill is not None,
            pull_from=self._pull_from if prefill is None else None,
            output_channel=self._calls.subscribe(decode),
        )
        remaining = remaining_seconds()
        self._calls.start(decode, decode.stub.Decode(to_decode, timeout=remaining, metadata=metadata))
        accepted = await self._accepted()
        if prefill is not None:
            to_prefill = worker_pb2.PrefillRequest(
                sequence=self._sequence, ticket=accepted.ticket, pull_from=self._pull_from
            )
            if prefill.health.is_lost:
                raise WorkerCallFailed(prefill, connection_lost())
            remaining = remaining_seconds()
            self._calls.start(prefill, prefill.stub.Prefill(to_prefill, timeout=remaining, metadata=metadata))
            if self.group.is_single:
                first = await self._first_token()
                yield [first]
                if first.finish_reason:
                    self._calls.has_all_outputs = True
                    return
        async for parts in self._decoded(remaining_seconds):
            yield parts

    async def _accepted(self) -> worker_pb2.Accepted:
        """Return D's acceptance: its promise to take P's blocks, or that it has computed the prompt itself.

        Raises:
            WorkerCallFailed: the call failed, or D sent something else first.
        """
        start = self._account.clock()
        event = await self._calls.next()
        while event.parts is not None:
            # Messages of the stream and of the call are not ordered.
            self._early.append(event)
            event = await self._calls.next()
        message = _message(event)
        if not message.HasField("accepted"):
            raise WorkerCallFailed(self.decode, None)
        if self.prefill is None:
            block_size = self.decode.info.layout.block_size
            self._account.record_local_prefill(self.group, self._placement, message, block_size, start)
        else:
            self._account.record_promise(start)
        accepted: worker_pb2.Accepted = message.accepted
        return accepted

    async def _first_token(self) -> AnswerPart:
        """Return P's first token; keep the events of D that arrive before it.

        Events of the two calls are not ordered. D's end of a short answer may arrive first. D's ABORTED error
        may arrive first too: D sends it when the push ends early, as it does when the first token is also the
        last. If the push ended for another reason, P's own call reports that.

        Raises:
            WorkerCallFailed: P's call failed, or D's call failed with another status.
        """
        start = self._account.clock()
        while True:
            event = await self._calls.next()
            if event.worker is self.decode and (event.error is None or _is_aborted(event.error)):
                self._early.append(event)
                continue
            message = _message(event)
            self._record_prefill(message)
            if message.tokens:
                self._account.record_computed(self.group, self._placement, message, start)
                return part_of_tokens(message.tokens, message.finish_reason)

    async def _decoded(
        self, remaining_seconds: Callable[[], float]
    ) -> AsyncGenerator[list[AnswerPart], None]:
        """Yield D's outputs.

        D's first message proves that the blocks have arrived: a failure of P after it is ignored.
        """
        num_left = len(self.group.answers)
        has_blocks = self.prefill is None
        has_ended = False
        while True:
            event = await self._next_decoded(remaining_seconds() if has_ended else None)
            if event.worker is self.decode and event.is_end:
                has_ended = True
                continue
            if event.worker is self.prefill:
                if event.error is not None and not has_blocks:
                    raise WorkerCallFailed(event.worker, event.error)
                if event.message is not None:
                    self._record_prefill(event.message)
                continue
            if (parts := event.parts) is None:
                raise WorkerCallFailed(event.worker, event.error)
            has_blocks = True
            num_finished = sum(bool(part.finish_reason) for part in parts)
            num_left -= num_finished
            if num_finished and self.group.is_beam_search:
                # All answers of a beam search come in one message. If few tokens are allowed, there may be
                # fewer answers than beams.
                del self.group.answers[num_finished:]
                num_left = 0
            if not num_left:
                self._calls.has_all_outputs = True
                await self._finish_calls()
            yield parts
            if not num_left:
                return

    async def _next_decoded(self, seconds: float | None) -> Event:
        """Return the next event, waiting at most ``seconds`` (None: no limit).

        Raises:
            WorkerCallFailed: no event arrived in that time.
        """
        if self._early:
            return self._early.popleft()
        if seconds is None:
            return await self._calls.next()
        try:
            async with asyncio.timeout(seconds):
                return await self._calls.next()
        except TimeoutError:
            raise WorkerCallFailed(self.decode, None) from None

    async def _finish_calls(self) -> None:
        """Wait up to ``CALL_END_SECONDS`` for the worker calls to end after D's last message.

        This counts P's summary of the push, and avoids aborting a call that is about to end.
        """
        with suppress(TimeoutError, AttemptMoved):
            async with asyncio.timeout(CALL_END_SECONDS):
                while self._calls.num_running:
                    event = await self._calls.next()
                    if event.worker is self.prefill and event.message is not None:
                        self._record_prefill(event.message)

    def _record_prefill(self, message: worker_pb2.PrefillResponse) -> None:
        self.num_pushed += message.pushed.num_blocks
        self._account.record_prefill(message)

    async def _cause(self, failure: WorkerCallFailed) -> WorkerCallFailed:
        """Return the failure that caused ``failure``, as far as it is known within ``CALL_END_SECONDS``."""
        with suppress(TimeoutError, AttemptMoved):
            async with asyncio.timeout(CALL_END_SECONDS):
                while failure.may_have_cause and self._calls.num_running:
                    event = await self._calls.next()
                    if event.error is not None and not _is_aborted(event.error):
                        failure = WorkerCallFailed(event.worker, event.error)
        return failure


OnParts = Callable[[], None]
"""Called each time answers of the attempt have grown."""
Follower = Callable[[Attempt], AbstractContextManager[OnParts | None]]
"""A feature of the router that follows an attempt until its context ends, without the attempt knowing it."""


def _is_aborted(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.ABORTED


def _message(event: Event) -> Any:
    """Return the message of an event.

    Raises:
        WorkerCallFailed: the event has no message.
    """
    if event.message is None:
        raise WorkerCallFailed(event.worker, event.error)
    return event.message
