"""Runs one attempt of a request on its chosen workers: the call to D, the call to P, and their order.

D is the decode worker and P the prefill worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from quire.protos import worker_pb2
from quire.services.router.execution.failures import WorkerCallFailed
from quire.services.router.execution.followers import Plan
from quire.services.router.execution.request_account import RequestAccount
from quire.services.router.execution.worker_calls import AttemptMoved, Event, WorkerCalls, connection_lost
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.router.workers.answer_part import AnswerPart, part_of_tokens

CALL_END_SECONDS = 0.5
"""Longest time that a request waits for a worker call to end: for P's summary of the push, or for the failure
that caused an abort or the end of a stream of outputs."""


class Attempt:
    """The calls of one attempt.

    Args:
        plan: the workers.
        group: the answers that the attempt continues.
        calls: starts the calls, and returns their events as they arrive.
        account: records what the calls report.
    """

    def __init__(self, plan: Plan, group: AnswerGroup, calls: WorkerCalls, account: RequestAccount) -> None:
        self._plan = plan
        self._group = group
        self._calls = calls
        self._account = account
        self._early: deque[Event] = deque()
        """Events of D that arrived before its acceptance or P's first token."""

    async def outputs(
        self, sequence: worker_pb2.Sequence, remaining_seconds: Callable[[], float]
    ) -> AsyncGenerator[list[AnswerPart], None]:
        """Yield the parts of the answers as they arrive: P's first token, if there is a P, then D's outputs.

        Args:
            sequence: the prompt, the tokens already sent, and the parameters.
            remaining_seconds: returns the time left for a call, or raises DeadlineExceeded.

        Raises:
            WorkerCallFailed: a call failed; see ``cause``.
            AttemptMoved: the attempt ended so that the next one continues on another worker.
        """
        plan, metadata = self._plan, self._account.phases.span.metadata
        decode = worker_pb2.DecodeRequest(
            sequence=sequence,
            remote_prefill=plan.prefill is not None,
            pull_from=plan.pull_from if plan.prefill is None else None,
            output_channel=self._calls.subscribe(plan.decode),
        )
        remaining = remaining_seconds()
        call = plan.decode.stub.Decode(decode, timeout=remaining, metadata=metadata)
        self._calls.start(plan.decode, call)
        accepted = await self._accepted()
        if plan.prefill is not None:
            prefill = worker_pb2.PrefillRequest(
                sequence=sequence, ticket=accepted.ticket, pull_from=plan.pull_from
            )
            if plan.prefill.health.is_lost:
                raise WorkerCallFailed(plan.prefill, connection_lost())
            remaining = remaining_seconds()
            call = plan.prefill.stub.Prefill(prefill, timeout=remaining, metadata=metadata)
            self._calls.start(plan.prefill, call)
            if self._group.is_single:
                first = await self._first_token()
                yield [first]
                if first.finish_reason:
                    return
        async for parts in self._decoded(remaining_seconds):
            yield parts

    async def cause(self, failure: WorkerCallFailed) -> WorkerCallFailed:
        """Return the failure that caused ``failure``, as far as it is known within ``CALL_END_SECONDS``."""
        with suppress(TimeoutError, AttemptMoved):
            async with asyncio.timeout(CALL_END_SECONDS):
                while failure.may_have_cause and self._calls.num_running:
                    event = await self._calls.next()
                    if event.error is not None and not _is_aborted(event.error):
                        failure = WorkerCallFailed(event.worker, event.error)
        return failure

    async def _accepted(self) -> worker_pb2.Accepted:
        """Return D's acceptance of the sequence.

        Raises:
            WorkerCallFailed: the call failed, or D sent something else first.
        """
        plan, start = self._plan, self._account.clock()
        event = await self._calls.next()
        while event.parts is not None:
            # Messages of the stream and of the call are not ordered.
            self._early.append(event)
            event = await self._calls.next()
        message = _message(event)
        if not message.HasField("accepted"):
            raise WorkerCallFailed(plan.decode, None)
        if plan.prefill is None:
            block_size = plan.decode.info.layout.block_size
            self._account.record_local_prefill(self._group, plan.placement, message, block_size, start)
        else:
            self._account.record_accepted(message, start)
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
            if event.worker is self._plan.decode and (event.error is None or _is_aborted(event.error)):
                self._early.append(event)
                continue
            message = _message(event)
            self._account.record_prefill(message)
            if message.tokens:
                self._account.record_computed(self._group, self._plan.placement, message, start)
                return part_of_tokens(message.tokens, message.finish_reason)

    async def _decoded(
        self, remaining_seconds: Callable[[], float]
    ) -> AsyncGenerator[list[AnswerPart], None]:
        """Yield D's outputs.

        D's first message proves that the blocks have arrived: a failure of P after it is ignored.
        """
        num_left = len(self._group.answers)
        has_blocks = self._plan.prefill is None
        has_ended = False
        while True:
            event = await self._next_decoded(remaining_seconds() if has_ended else None)
            if event.worker is self._plan.decode and event.is_end:
                has_ended = True
                continue
            if event.worker is self._plan.prefill:
                if event.error is not None and not has_blocks:
                    raise WorkerCallFailed(event.worker, event.error)
                if event.message is not None:
                    self._account.record_prefill(event.message)
                continue
            if (parts := event.parts) is None:
                raise WorkerCallFailed(event.worker, event.error)
            has_blocks = True
            num_finished = sum(bool(part.finish_reason) for part in parts)
            num_left -= num_finished
            if self._group.is_beam_search and num_finished:
                # All answers of a beam search come in one message. If few tokens are allowed, there may be
                # fewer answers than beams.
                del self._group.answers[num_finished:]
                num_left = 0
            if not num_left:
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
            raise WorkerCallFailed(self._plan.decode, None) from None

    async def _finish_calls(self) -> None:
        """Wait up to ``CALL_END_SECONDS`` for the worker calls to end after D's last message.

        This counts P's summary of the push, and avoids aborting a call that is about to end.
        """
        with suppress(TimeoutError, AttemptMoved):
            async with asyncio.timeout(CALL_END_SECONDS):
                while self._calls.num_running:
                    event = await self._calls.next()
                    if event.worker is self._plan.prefill and event.message is not None:
                        self._account.record_prefill(event.message)


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
