"""The life of one request in the router."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import grpc.aio

from quire.kvindex.block_hash import CacheScope
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.errors import Unavailable
from quire.services.log import get_logger
from quire.services.phases import Phase, RequestPhases
from quire.services.router.best_of import best_of
from quire.services.router.failures import (
    RETRY_AFTER_SECONDS,
    LegFailed,
    deadline_exceeded,
    to_service_error,
)
from quire.services.router.legs import Event, Legs, Spawn
from quire.services.router.merge import merged
from quire.services.router.metrics import RouterMetrics
from quire.services.router.output import OutputAssembler
from quire.services.router.part import Part
from quire.services.router.planner import Placement, Planner, Prompt, WorkerState
from quire.services.router.prefix_lookup import PrefixLookup
from quire.services.router.pulls import pull_source
from quire.services.router.request_account import RequestAccount
from quire.services.router.workers import Worker, WorkerSet
from quire.services.router.write_back import WriteBacks
from quire.services.served_model import ServedModel
from quire.services.validation import ValidRequest

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
    planner: Planner
    clock: Callable[[], float] = time.monotonic
    write_backs: WriteBacks | None = None
    """Bring the blocks of answers to prefill workers; None: nobody does."""


class Plan(NamedTuple):
    """Who serves an attempt; without a prefill worker the decode worker computes the prompt."""

    decode: Worker
    prefill: Worker | None
    placement: Placement
    """Why these two, and what is expected of them."""
    pull_from: worker_pb2.PullSource | None = None
    """Whose blocks the worker that computes the prompt copies first."""


class GenerationRun:
    """Serves one request, over as many attempts as it takes.

    1. Choose: ask the index who holds the prompt's blocks; choose D, and P if P is worth it.
    2. ``D.Decode``: D accepts, names the place for the blocks and what it holds of them.
    3. ``P.Prefill``: P computes the prompt, pushes the blocks to D and draws the first token, which goes to
       the client at once. Without P, D does it all and this step falls away.
       Of several answers D draws all tokens, from the prompt's last one, which P leaves to it.
    4. D streams the tokens. What is new of an answer becomes one message to the client: ids, and the text
       that is certain and holds no stop string.
    5. The end: a finish reason from P or D, or a stop string, for each answer. Whoever still runs is aborted.
    6. A leg fails: both are aborted, and the next attempt continues on other workers from prompt + tokens
       already sent, with the same seed. Nothing is repeated or lost. Several answers go on each by itself; a
       beam search, of which nothing was sent, starts again.

    One deadline, a reading of the cluster's clock, holds for all of it: every call carries what is left.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: ValidRequest,
        scope: CacheScope,
        deadline: float,
        phases: RequestPhases,
    ) -> None:
        self._cluster = cluster
        self._request = request
        self._scope = scope
        self._deadline = deadline
        self._phases = phases
        self._metadata = phases.span.metadata
        # Clients may choose the same id; a worker must never see it twice.
        self._sequence_id = f"{request.request_id}-{secrets.token_hex(4)}"
        num_answers = request.sampling.beam.width or request.sampling.n or 1
        self._answers = [OutputAssembler(request, cluster.model.tokenizer, i) for i in range(num_answers)]
        self._shunned: set[str] = set()
        self._is_first_message = True
        self._plan: Plan | None = None
        self._account = RequestAccount(
            cluster.metrics, cluster.planner, cluster.clock, len(request.prompt_token_ids)
        )

    @property
    def usage(self) -> pb.Usage:
        """What the request has cost until now."""
        return self._account.usage

    async def stream(self) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Yield the answers' messages; each answer's last one carries its finish reason.

        Raises:
            ServiceError: the request cannot be served, or not to its end.
        """
        request = self._request
        part = Part(self._sequence_id, request.prompt_token_ids, request.sampling, self._answers)
        num_finished = 0
        stream = self._serve(part)
        if request.num_best is not None:
            stream = best_of(stream, self._answers, request.num_best)
        async with aclosing(stream) as responses:
            async for response in responses:
                if self._is_first_message:
                    self._is_first_message = False
                    response.request_id = request.request_id
                    response.prompt_logprobs.extend(self._account.prompt_logprobs)
                    response.prompt_tokens = len(request.prompt_token_ids)
                    if request.wants_prompt_token_ids:
                        response.prompt_token_ids.extend(request.prompt_token_ids)
                self.usage.completion_tokens = self._num_emitted
                num_finished += bool(response.finish_reason)
                if is_last := num_finished == (request.num_best or len(self._answers)):
                    response.usage.CopyFrom(self.usage)
                    self._offer_write_back()
                yield response
                if is_last:
                    return

    async def _serve(self, part: Part) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Yield the messages of a part's answers, over as many attempts as it takes."""
        while not part.is_finished:
            try:
                async with aclosing(self._attempt(part)) as outputs:
                    async for output in outputs:
                        answer = part.answers[output.index]
                        # Past its stop string D goes on until the others have ended.
                        if not answer.finish_reason:
                            self.usage.accepted_draft_tokens += output.num_accepted_draft_tokens
                            yield answer.respond(output)
                        if part.is_finished:
                            return
            except LegFailed as failure:
                for answer in part.answers:
                    reason = answer.implied_finish_reason(self._cluster.model.eos_token_ids)
                    if reason and not answer.finish_reason:
                        yield answer.respond(worker_pb2.SequenceOutput(finish_reason=reason))
                if part.is_finished:
                    return
                self._give_up_attempt(part, failure)
            await asyncio.sleep(RETRY_BACKOFF_SECONDS * part.attempt)
            if part.must_split:
                async with aclosing(merged(map(self._serve, part.split()))) as responses:
                    async for response in responses:
                        yield response

    async def _attempt(self, part: Part) -> AsyncGenerator[worker_pb2.SequenceOutput, None]:
        self._plan = plan = await self._choose(part)
        with ExitStack() as accounts:
            dispatched = self._cluster.workers.dispatched
            num_tokens, owed = len(part.token_ids), plan.placement.owed_tokens
            if plan.prefill is None:
                computed = accounts.enter_context(
                    dispatched(plan.decode, owed_tokens=owed, kept_tokens=num_tokens)
                )
            else:
                accounts.enter_context(dispatched(plan.decode, kept_tokens=num_tokens))
                computed = accounts.enter_context(dispatched(plan.prefill, owed_tokens=owed))
            legs = Legs(part.sequence_id, part.attempt, self._cluster.spawn)
            async with legs, aclosing(self._run(legs, plan, part)) as outputs:
                async for output in outputs:
                    computed()
                    yield output

    async def _choose(self, part: Part) -> Plan:
        cluster, token_ids = self._cluster, part.token_ids
        start = cluster.clock()
        block_hashes, held_tokens = await cluster.prefixes.look_up(token_ids, self._scope)
        looked_up = cluster.clock()
        self._phases.record(Phase.LOOKUP, start, looked_up)
        # The logprob of the prompt's last token would be lost where P computes the prompt without it.
        is_scored = not part.is_single and self._request.num_prompt_logprobs is not None
        must_be_local = is_scored or part.num_prefilled_tokens == 0
        placement = cluster.planner.place(
            Prompt(len(token_ids), block_hashes, held_tokens, must_be_local),
            self._states("prefill"),
            self._states("decode"),
        )
        if placement is None:
            raise Unavailable(
                "no decode worker is alive; start one, or try again",
                reason="NO_DECODE_WORKER",
                metadata={"tokens_emitted": str(self._num_emitted)},
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._phases.record(Phase.CHOOSE, looked_up, cluster.clock())
        self._account.chosen(part, placement)
        workers = {w.worker_id: w for role in ("prefill", "decode") for w in cluster.workers.live(role)}
        return Plan(
            workers[placement.decode.worker_id],
            workers[placement.prefill.worker_id] if placement.prefill else None,
            placement,
            pull_source(placement.pull, workers[placement.pull.worker_id]) if placement.pull else None,
        )

    def _states(self, role: str) -> list[WorkerState]:
        workers = self._cluster.workers
        return [
            WorkerState(
                worker.worker_id,
                worker.info.num_blocks,
                owed_tokens=worker.owed_tokens,
                kept_tokens=worker.kept_tokens,
                num_requests=worker.num_requests,
                is_shunned=workers.is_shunned(worker) or worker.worker_id in self._shunned,
            )
            for worker in workers.live(role)
        ]

    async def _run(
        self, legs: Legs, plan: Plan, part: Part
    ) -> AsyncGenerator[worker_pb2.SequenceOutput, None]:
        sequence = self._sequence(part)
        decode = worker_pb2.DecodeRequest(
            sequence=sequence,
            remote_prefill=plan.prefill is not None,
            pull_from=plan.pull_from if plan.prefill is None else None,
        )
        remaining = self._remaining_seconds()
        call = plan.decode.stub.Decode(decode, timeout=remaining, metadata=self._metadata)
        legs.start(plan.decode, call)
        accepted = await self._accepted(legs, plan)
        early: deque[Event] = deque()
        if plan.prefill is not None:
            prefill = worker_pb2.PrefillRequest(
                sequence=sequence, ticket=accepted.ticket, pull_from=plan.pull_from
            )
            remaining = self._remaining_seconds()
            call = plan.prefill.stub.Prefill(prefill, timeout=remaining, metadata=self._metadata)
            legs.start(plan.prefill, call)
            if part.is_single:
                first = await self._first_token(legs, plan, early)
                yield first
                if first.finish_reason:
                    return
        async for output in self._decoded(legs, plan, part, early):
            yield output

    def _sequence(self, part: Part) -> worker_pb2.Sequence:
        request = self._request
        return worker_pb2.Sequence(
            request_id=part.sequence_id,
            attempt=part.attempt,
            token_ids=part.token_ids,
            num_output_tokens=len(part.output_token_ids),
            sampling=part.sampling,
            stopping=request.stopping,
            format=request.format,
            # The best answers are found by the logprobs of their tokens.
            logprobs=0 if request.num_logprobs is None and request.num_best else request.num_logprobs,
            cache_scope=worker_pb2.CacheScope(tenant=self._scope.tenant, salt=self._scope.salt),
            # The first message brings them, and with it the first token.
            prompt_logprobs=request.num_prompt_logprobs if self._is_first_message else None,
        )

    async def _accepted(self, legs: Legs, plan: Plan) -> worker_pb2.Accepted:
        """Return what D promised."""
        start = self._cluster.clock()
        message = _message(await legs.next())
        if not message.HasField("accepted"):
            raise LegFailed(plan.decode, None)
        if plan.prefill is None:
            block_size = self._cluster.model.block_size
            self._account.computed_by_decode(message, block_size, plan.placement, start)
        else:
            accepted_at = self._cluster.clock()
            self._phases.record(Phase.ACCEPT, start, accepted_at)
            self._cluster.planner.promised(accepted_at - start)
            self._account.accepted(message)
        accepted: worker_pb2.Accepted = message.accepted
        return accepted

    async def _first_token(self, legs: Legs, plan: Plan, early: deque[Event]) -> worker_pb2.SequenceOutput:
        """Return P's first token; what D sends before it goes into ``early``.

        The calls are not ordered: of a short answer D's end may come first, and so may D's complaint that the
        push ended, as it does where the first token is the last. What else ends a push, P tells by itself.
        """
        start = self._cluster.clock()
        while True:
            event = await legs.next()
            if event.worker is plan.decode and (event.error is None or _is_aborted(event.error)):
                early.append(event)
                continue
            message = _message(event)
            self._account.prefilled(message)
            if message.tokens:
                self._account.learn(plan.placement, message, start)
                return worker_pb2.SequenceOutput(tokens=message.tokens, finish_reason=message.finish_reason)

    async def _decoded(
        self, legs: Legs, plan: Plan, part: Part, early: deque[Event]
    ) -> AsyncGenerator[worker_pb2.SequenceOutput, None]:
        """Yield D's outputs; P's failure counts until D's first, which proves that the blocks arrived."""
        num_left = len(part.answers)
        has_blocks = plan.prefill is None
        while True:
            event = early.popleft() if early else await legs.next()
            if event.worker is plan.prefill:
                if event.error is not None and not has_blocks:
                    raise LegFailed(event.worker, event.error)
                if event.message is not None:
                    self._account.prefilled(event.message)
                continue
            message = _message(event)
            has_blocks = True
            num_left -= sum(bool(output.finish_reason) for output in message.outputs)
            if part.is_search and message.outputs:
                # All answers come at once, fewer than there were beams where few tokens are allowed.
                del part.answers[len(message.outputs) :]
                num_left = 0
            if not num_left:
                await self._settle(legs, plan)
            for output in message.outputs:
                yield output
            if not num_left:
                return

    async def _settle(self, legs: Legs, plan: Plan) -> None:
        """Wait for the legs' ends after D's last message, for P's account and to leave nothing to abort."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while legs.num_running:
                    event = await legs.next()
                    if event.worker is plan.prefill and event.message is not None:
                        self._account.prefilled(event.message)
        except TimeoutError:
            return

    def _offer_write_back(self) -> None:
        """Let the prompt's prefill worker copy what a single answer has added."""
        plan, write_backs = self._plan, self._cluster.write_backs
        if write_backs is None or plan is None or plan.prefill is None or len(self._answers) > 1:
            return
        prompt = self._request.prompt_token_ids
        scope = worker_pb2.CacheScope(tenant=self._scope.tenant, salt=self._scope.salt)
        tokens = prompt + self._answers[0].token_ids
        write_backs.offer(plan.decode, plan.prefill, tokens, len(prompt), scope)

    def _give_up_attempt(self, part: Part, failure: LegFailed) -> None:
        """Prepare the next attempt, or raise the client's error."""
        is_last = not failure.is_retryable or part.attempt >= MAX_RETRIES
        self._account.failed(part, failure, self._num_emitted, is_last=is_last)
        if failure.is_unreachable:
            self._cluster.workers.shun(failure.worker)
        if is_last:
            raise to_service_error(failure, self._num_emitted, part.attempt) from failure
        self._shunned.add(failure.worker.worker_id)
        part.attempt += 1

    @property
    def _num_emitted(self) -> int:
        return sum(len(answer.token_ids) for answer in self._answers)

    def _remaining_seconds(self) -> float:
        remaining = self._deadline - self._cluster.clock()
        if remaining <= 0:
            raise deadline_exceeded(self._num_emitted)
        return remaining


def _is_aborted(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.ABORTED


def _message(event: Event) -> Any:
    """Return the message of an event that must be one."""
    if event.message is None:
        raise LegFailed(event.worker, event.error)
    return event.message
