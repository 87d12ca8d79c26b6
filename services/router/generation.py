"""The life of one request in the router."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.errors import Unavailable
from quire.services.log import get_logger
from quire.services.router import policy
from quire.services.router.failures import (
    RETRY_AFTER_SECONDS,
    LegFailed,
    deadline_exceeded,
    to_service_error,
)
from quire.services.router.legs import Event, Legs, Spawn
from quire.services.router.metrics import RouterMetrics
from quire.services.router.output import OutputAssembler
from quire.services.router.prefix_lookup import PrefixLookup
from quire.services.router.validation import ServedModel, ValidRequest
from quire.services.router.workers import Worker, WorkerSet

MAX_RETRIES = 3
RETRY_BACKOFF_SECONDS = 0.05
SETTLE_SECONDS = 0.5
"""How long a finished request waits for P's account of what it pushed."""

_log = get_logger("router")


@dataclass(frozen=True, slots=True)
class Cluster:
    """What all requests share."""

    model: ServedModel
    workers: WorkerSet
    prefixes: PrefixLookup
    metrics: RouterMetrics
    spawn: Spawn
    """Runs a coroutine beyond the end of its request."""
    local_prefill_tokens: int = 0
    """A decode worker computes up to this many uncached prompt tokens itself."""
    clock: Callable[[], float] = time.monotonic


class Plan(NamedTuple):
    """Who serves an attempt; without a prefill worker the decode worker computes the prompt."""

    decode: Worker
    prefill: Worker | None
    uncached_tokens: int
    """What the prefill worker must compute, by the index."""


class Step(NamedTuple):
    """What one message of a worker brings."""

    tokens: Sequence[worker_pb2.SampledToken]
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED


class GenerationRun:
    """Serves one request, over as many attempts as it takes.

    1. Choose: ask the index who holds the prompt's blocks; choose D, and P if P is worth it.
    2. ``D.Decode``: D accepts, names the place for the blocks and what it holds of them.
    3. ``P.Prefill``: P computes the prompt, pushes the blocks to D and draws the first token, which goes to
       the client at once. Without P, D does it all and this step falls away.
    4. D streams the tokens after the first. Each worker message becomes one message to the client: ids, and
       the text that is certain and holds no stop string.
    5. The end: a finish reason from P or D, or a stop string. Whoever still runs is aborted.
    6. A leg fails: both are aborted, and the next attempt continues on other workers from prompt + tokens
       already sent, with the same seed. Nothing is repeated or lost.

    One deadline, a reading of the cluster's clock, holds for all of it: every call carries what is left.
    """

    def __init__(self, cluster: Cluster, request: ValidRequest, deadline: float) -> None:
        self._cluster = cluster
        self._request = request
        self._deadline = deadline
        # Clients may choose the same id; a worker must never see it twice.
        self._sequence_id = f"{request.request_id}-{secrets.token_hex(4)}"
        self._output = OutputAssembler(request, cluster.model.tokenizer)
        self._shunned: set[str] = set()
        self._is_first_message = True
        self._is_cache_counted = False
        self.usage = pb.Usage(prompt_tokens=len(request.prompt_token_ids))

    async def stream(self) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Yield the answer's messages; the last one carries the finish reason.

        Raises:
            ServiceError: the request cannot be served, or not to its end.
        """
        while True:
            try:
                async with aclosing(self._attempt()) as steps:
                    async for step in steps:
                        response = self._respond(step)
                        yield response
                        if response.finish_reason:
                            return
            except LegFailed as failure:
                if finish_reason := self._implied_finish_reason():
                    yield self._respond(Step([], finish_reason))
                    return
                self._account_failure(failure)
            await asyncio.sleep(RETRY_BACKOFF_SECONDS * self.usage.retries)

    async def _attempt(self) -> AsyncGenerator[Step, None]:
        plan = await self._choose()
        legs = Legs(self._sequence_id, self._cluster.spawn)
        try:
            with ExitStack() as accounts:
                dispatched = self._cluster.workers.dispatched
                accounts.enter_context(dispatched(plan.decode, len(self._token_ids)))
                if plan.prefill is not None:
                    release = accounts.enter_context(dispatched(plan.prefill, plan.uncached_tokens))
                async with legs, aclosing(self._run(legs, plan)) as steps:
                    async for step in steps:
                        if plan.prefill is not None:
                            release()
                        yield step
        except LegFailed:
            # An abort names no attempt: one that came late would end the next attempt.
            await legs.aborted()
            raise

    async def _run(self, legs: Legs, plan: Plan) -> AsyncGenerator[Step, None]:
        sequence = self._sequence()
        decode = worker_pb2.DecodeRequest(sequence=sequence, remote_prefill=plan.prefill is not None)
        legs.start(plan.decode, plan.decode.stub.Decode(decode, timeout=self._remaining_seconds()))
        accepted = await self._accepted(legs, plan)
        early: deque[Event] = deque()
        if plan.prefill is not None:
            prefill = worker_pb2.PrefillRequest(sequence=sequence, ticket=accepted.ticket)
            legs.start(plan.prefill, plan.prefill.stub.Prefill(prefill, timeout=self._remaining_seconds()))
            first = await self._first_token(legs, plan, early)
            yield first
            if first.finish_reason:
                return
        async for step in self._decoded(legs, plan, early):
            yield step

    async def _accepted(self, legs: Legs, plan: Plan) -> worker_pb2.Accepted:
        """Return what D promised."""
        message = _message(await legs.next())
        if not message.HasField("accepted"):
            raise LegFailed(plan.decode, None)
        accepted: worker_pb2.Accepted = message.accepted
        if plan.prefill is None:
            self._count_cached(accepted.num_cached_tokens)
        else:
            self.usage.blocks_reused_on_decode = accepted.ticket.first_block
        return accepted

    async def _first_token(self, legs: Legs, plan: Plan, early: deque[Event]) -> Step:
        """Return P's first token; what D sends before it (the calls are not ordered) goes into ``early``."""
        while True:
            event = await legs.next()
            if event.worker is plan.decode and event.message is not None:
                early.append(event)
                continue
            message = _message(event)
            self._count_prefill(message)
            if message.tokens:
                return Step(message.tokens, message.finish_reason)

    async def _decoded(self, legs: Legs, plan: Plan, early: deque[Event]) -> AsyncGenerator[Step, None]:
        """Yield D's steps; P's failure counts until D's first, which proves that the blocks arrived."""
        has_blocks = plan.prefill is None
        while True:
            event = early.popleft() if early else await legs.next()
            if event.worker is plan.prefill:
                if event.error is not None and not has_blocks:
                    raise LegFailed(event.worker, event.error)
                if event.message is not None:
                    self._count_prefill(event.message)
                continue
            message = _message(event)
            has_blocks = True
            if message.finish_reason:
                await self._settle(legs, plan)
            if message.tokens or message.finish_reason:
                yield Step(message.tokens, message.finish_reason)
            if message.finish_reason:
                return

    async def _settle(self, legs: Legs, plan: Plan) -> None:
        """Wait for the legs' ends after D's last message, for P's account and to leave nothing to abort."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while legs.num_running:
                    event = await legs.next()
                    if event.worker is plan.prefill and event.message is not None:
                        self._count_prefill(event.message)
        except TimeoutError:
            return

    async def _choose(self) -> Plan:
        token_ids = self._token_ids
        cached = await self._cluster.prefixes.cached_tokens(token_ids)
        key = policy.affinity_key(token_ids, self._cluster.model.block_size)
        workers = {w.worker_id: w for role in ("prefill", "decode") for w in self._cluster.workers.live(role)}
        decode = policy.choose_decode(self._candidates("decode", cached), len(token_ids), key)
        if decode is None:
            raise Unavailable(
                "no decode worker is alive; start one, or try again",
                reason="NO_DECODE_WORKER",
                metadata={"tokens_emitted": str(len(self._output.token_ids))},
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        prefill = policy.choose_prefill(self._candidates("prefill", cached), len(token_ids), key)
        if not policy.needs_prefill_worker(decode, len(token_ids), self._cluster.local_prefill_tokens):
            prefill = None
        self._account_choice(decode, prefill)
        if prefill is None:
            return Plan(workers[decode.worker_id], None, 0)
        uncached = len(token_ids) - prefill.cached_tokens
        return Plan(workers[decode.worker_id], workers[prefill.worker_id], uncached)

    def _candidates(self, role: str, cached: Mapping[str, int]) -> list[policy.Candidate]:
        workers = self._cluster.workers
        return [
            policy.Candidate(
                worker.worker_id,
                cached_tokens=cached.get(worker.worker_id, 0),
                load_tokens=worker.load_tokens,
                is_shunned=workers.is_shunned(worker) or worker.worker_id in self._shunned,
            )
            for worker in workers.live(role)
        ]

    @property
    def _token_ids(self) -> list[int]:
        return self._request.prompt_token_ids + self._output.token_ids

    def _sequence(self) -> worker_pb2.Sequence:
        request = self._request
        return worker_pb2.Sequence(
            request_id=self._sequence_id,
            attempt=self.usage.retries,
            token_ids=self._token_ids,
            num_output_tokens=len(self._output.token_ids),
            sampling=request.sampling,
            stopping=request.stopping,
            logprobs=request.num_logprobs,
        )

    def _remaining_seconds(self) -> float:
        remaining = self._deadline - self._cluster.clock()
        if remaining <= 0:
            raise deadline_exceeded(len(self._output.token_ids))
        return remaining

    def _respond(self, step: Step) -> pb.GenerateStreamResponse:
        delta = self._output.add(step.tokens)
        finish_reason = pb.FINISH_REASON_STOP if delta.is_stopped else step.finish_reason
        text = delta.text
        if finish_reason and not delta.is_stopped:
            rest = self._output.flush()
            text += rest.text
            finish_reason = pb.FINISH_REASON_STOP if rest.is_stopped else finish_reason
        response = pb.GenerateStreamResponse(
            text=text, token_ids=delta.token_ids, logprobs=delta.logprobs, finish_reason=finish_reason
        )
        if self._is_first_message:
            self._is_first_message = False
            response.request_id = self._request.request_id
        self.usage.completion_tokens = len(self._output.token_ids)
        if finish_reason:
            response.usage.CopyFrom(self.usage)
        return response

    def _implied_finish_reason(self) -> pb.FinishReason:
        """Return the finish reason that a lost worker had no time to send, if the tokens imply one."""
        stopping, tokens = self._request.stopping, self._output.token_ids
        if not tokens:
            return pb.FINISH_REASON_UNSPECIFIED
        stops = set(stopping.stop_token_ids)
        if not stopping.ignore_eos:
            stops |= self._cluster.model.eos_token_ids
        if tokens[-1] in stops and len(tokens) >= stopping.min_tokens:
            return pb.FINISH_REASON_STOP
        if len(tokens) >= stopping.max_tokens:
            return pb.FINISH_REASON_LENGTH
        return pb.FINISH_REASON_UNSPECIFIED

    def _account_failure(self, failure: LegFailed) -> None:
        """Prepare the next attempt, or raise the client's error."""
        metrics, worker, retries = self._cluster.metrics, failure.worker, self.usage.retries
        is_last = not failure.is_retryable or retries >= MAX_RETRIES
        _log.warning(
            "attempt_failed",
            request_id=self._sequence_id,
            attempt=retries,
            worker=worker.worker_id,
            role=worker.info.role,
            code=failure.code.name,
            details=failure.details,
            tokens_emitted=len(self._output.token_ids),
            is_last=is_last,
        )
        if failure.is_unreachable:
            self._cluster.workers.shun(worker)
        if is_last:
            raise to_service_error(failure, len(self._output.token_ids), retries) from failure
        self._shunned.add(worker.worker_id)
        self.usage.retries += 1
        is_prefill = worker.info.role == "prefill"
        (metrics.prefill_retries if is_prefill else metrics.decode_retries).inc()

    def _account_choice(self, decode: policy.Choice, prefill: policy.Choice | None) -> None:
        decisions = self._cluster.metrics.decisions
        decisions.labels("decode", decode.reason).inc()
        decisions.labels("prefill", prefill.reason if prefill else "none").inc()
        _log.debug(
            "request_dispatched",
            request_id=self._sequence_id,
            attempt=self.usage.retries,
            decode=decode.worker_id,
            decode_reason=decode.reason,
            prefill=prefill.worker_id if prefill else "none",
            prefill_reason=prefill.reason if prefill else "none",
            cached_tokens=prefill.cached_tokens if prefill else decode.cached_tokens,
        )

    def _count_prefill(self, message: worker_pb2.PrefillResponse) -> None:
        if message.tokens:
            self._count_cached(message.num_cached_tokens)
        if message.HasField("pushed"):
            self.usage.blocks_shipped += message.pushed.num_blocks
            self.usage.bytes_shipped += message.pushed.num_bytes

    def _count_cached(self, num_tokens: int) -> None:
        # Later attempts find what the first one computed: only the first tells what was there before.
        if not self._is_cache_counted:
            self._is_cache_counted = True
            self.usage.cached_prompt_tokens = min(num_tokens, self.usage.prompt_tokens)


def _message(event: Event) -> Any:
    """Return the message of an event that must be one."""
    if event.message is None:
        raise LegFailed(event.worker, event.error)
    return event.message
