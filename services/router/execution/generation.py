"""Runs one request in the router, from the choice of its workers to its last token.

D is the decode worker and P the prefill worker of an attempt. ``attempt.py`` makes the calls to them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace

from quire.fairness.patience import patience
from quire.kvindex.block_hash import CacheScope
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.routing.placement import Placement
from quire.rpc.errors import InvalidArgument
from quire.sampling.messages import to_proto
from quire.services.requests.validation import ValidRequest
from quire.services.router.execution.attempt import Attempt
from quire.services.router.execution.cluster import Cluster
from quire.services.router.execution.failures import (
    WorkerCallFailed,
    deadline_exceeded,
    suspected,
    to_service_error,
)
from quire.services.router.execution.request_account import RequestAccount
from quire.services.router.execution.suspects import MAX_DEATHS
from quire.services.router.execution.token_charge import RequestCharge
from quire.services.router.execution.worker_calls import AttemptMoved, NextWorker
from quire.services.router.execution.worker_choice import WorkerChoice
from quire.services.router.outputs.answer_group import AnswerGroup, Death
from quire.services.router.outputs.best_of import best_of
from quire.services.router.outputs.merge import merged
from quire.services.router.outputs.output import OutputAssembler
from quire.services.router.workers.answer_part import AnswerPart
from quire.services.server.log import EventLogger
from quire.services.server.phases import RequestPhases

MAX_RETRIES = 3
RETRY_BACKOFF_SECONDS = 0.05

_log = EventLogger("router")


class GenerationRun:
    """Serves one request in one or more attempts, up to ``MAX_RETRIES`` + 1 while there are workers.

    1. Choose: look up in the index which workers have cached the prompt's blocks. Choose D, and also P if a
       prefill worker is worth it.
    2. ``D.Decode``: D accepts, and returns a ticket for the blocks and the number of blocks that it has
       cached.
    3. ``P.Prefill``: P computes the prompt, pushes the blocks to D and samples the first token, which goes to
       the client at once. Without P, D computes the prompt and this step is skipped.
       If the request has several answers, P leaves the prompt's last token to D, and D samples all tokens.
    4. D streams the tokens. The new part of an answer becomes one message to the client: token ids, and the
       text that is certain and contains no stop string.
    5. End: each answer ends with a finish reason from P or D, or with a stop string. A worker call that is
       still running is aborted.
    6. Failure of a worker call: both calls are aborted, and the next attempt continues on other workers from
       the prompt and the tokens already sent, with the same seed. Nothing is repeated or lost. Several
       answers continue separately. A beam search has sent nothing yet and starts again.
    7. If D drains, the attempt ends and the next one continues on another worker in the same way
       (``copies.py``). This is not a failure.

    One deadline, a reading of the cluster's clock, limits all attempts: every call carries the time left.

    ``session`` names the conversation that the request is a turn of; it may be empty.
    ``spend`` charges computed tokens that were not charged in advance.
    ``weight`` is the tenant's part of what tenants share; None: 1.
    """

    _make_choice: type[WorkerChoice] = WorkerChoice

    def __init__(
        self,
        cluster: Cluster,
        request: ValidRequest,
        scope: CacheScope,
        deadline: float,
        phases: RequestPhases,
        *,
        session: str,
        arrival: float,
        spend: Callable[[int], None],
        weight: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._weight = weight or 1
        self._request = request
        self._scope = scope
        self._session = session
        self._deadline = deadline
        num_answers = request.params.num_sequences
        self._answers = [OutputAssembler(request, cluster.model.tokenizer, i) for i in range(num_answers)]
        self._is_first_message = True
        self._account = RequestAccount(
            cluster.metrics,
            phases,
            cluster.planner,
            cluster.clock,
            len(request.prompt_token_ids),
            RequestCharge(spend, request.num_input_tokens),
        )
        due = arrival + patience(request.priority, deadline - arrival)
        self._choice = self._make_choice(
            cluster, scope, self._account, due, self._remaining_seconds, self._weight, request.descriptor
        )

    @property
    def usage(self) -> pb.Usage:
        """Tokens, blocks, bytes and retries of the request so far."""
        return self._account.usage

    async def stream(self) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Yield the messages of all answers; the last message of each answer carries its finish reason.

        Raises:
            ServiceError: the request cannot be served or cannot be completed.
        """
        request = self._request
        if request.received:
            # Converting thousands of tokens to text would block the event loop.
            await asyncio.to_thread(self._resume)
            self.usage.completion_tokens = sum(len(answer.token_ids) for answer in self._answers)
        group = self._group()
        num_finished = sum(bool(answer.finish_reason) for answer in self._answers)
        stream = self._serve(group)
        if request.num_best is not None:
            stream = best_of(stream, self._answers, request.num_best)
        async with aclosing(self._choice), aclosing(stream) as responses:
            async for response in responses:
                if self._is_first_message:
                    self._is_first_message = False
                    response.request_id = request.request_id
                    response.prompt_logprobs.extend(self._account.prompt_logprobs)
                    response.prompt_tokens = len(request.prompt_token_ids)
                    response.origin = self._cluster.model.origin(self._choice.descriptor, self._scope.adapter)
                    if request.is_clamped:
                        response.max_tokens = request.params.max_tokens
                    if request.response.prompt_token_ids:
                        response.prompt_token_ids.extend(request.prompt_token_ids)
                num_finished += bool(response.finish_reason)
                if is_last := num_finished == (request.num_best or len(self._answers)):
                    self.usage.reasoning_tokens = sum(each.num_reasoning_tokens for each in self._answers)
                    response.usage.CopyFrom(self.usage)
                    for answer in self._answers:
                        self._cluster.planner.record_answer(len(answer.token_ids))
                    self._record_turn()
                yield response
                if is_last:
                    return

    def _group(self) -> AnswerGroup:
        request = self._request
        # Clients may choose the same id; a worker must never see it twice.
        sequence_id = f"{request.request_id}-{secrets.token_hex(4)}"
        return AnswerGroup(
            request.request_id, sequence_id, request.prompt_token_ids, request.params, self._answers
        )

    def _record_turn(self) -> None:
        prompt, answers = self._request.prompt_token_ids, self._answers
        # Which of several answers the next prompt repeats is unknown.
        answer = answers[0].token_ids if len(answers) == 1 else ()
        turns, num_cached = self._cluster.metrics.turns, self.usage.cached_prompt_tokens
        turns.record(self._scope, self._session, prompt, answer, num_cached)

    def _resume(self) -> None:
        for received in self._request.received:
            self._answers[received.index].resume(received)

    async def _serve(
        self, group: AnswerGroup, next_worker: NextWorker | None = None
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Yield the messages of a group's answers; retry until they have finished or an error is final.

        Args:
            next_worker: runs the next attempt if it accepts requests; None: the planner chooses.
        """
        cluster = self._cluster
        for response in self._implied_ends(group):
            yield response
        while not group.is_finished:
            if group.must_split:
                separate = [self._serve(each, next_worker) for each in group.split()]
                async with aclosing(merged(separate)) as responses:
                    async for response in responses:
                        yield response
                return
            try:
                placement = await self._choice.choose(group, next_worker)
                sequence = self._sequence(group, placement)
                attempt = Attempt(cluster.workers, cluster.spawn, placement, group, sequence, self._account)
                self._choice.descriptor = attempt.decode.info.cache_descriptor
                running = attempt.outputs(cluster.followers, self._remaining_seconds)
                async with aclosing(running) as outputs:
                    async for parts in outputs:
                        await self._choice.aclose()
                        for part in parts:
                            answer = group.answers[part.index]
                            # D continues an answer past its stop string until the other answers have ended.
                            if not answer.finish_reason:
                                response = answer.respond(part)
                                self._account.record_tokens(
                                    len(response.token_ids), part.num_accepted_draft_tokens
                                )
                                yield response
                            if answer.finish_reason and group.is_finished:
                                return
            except WorkerCallFailed as failure:
                next_worker = None
                for response in self._implied_ends(group):
                    yield response
                if group.is_finished:
                    return
                await self._give_up_attempt(group, failure)
            except AttemptMoved as moved:
                next_worker = moved.next_worker
                group.attempt += 1
                group.num_moves += 1

    def _implied_ends(self, group: AnswerGroup) -> Iterator[pb.GenerateStreamResponse]:
        """Yield the last messages of answers whose tokens are complete, but whose finish reason was lost."""
        for answer in group.answers:
            reason = answer.implied_finish_reason(self._cluster.model.eos_token_ids)
            if reason and not answer.finish_reason:
                yield answer.respond(AnswerPart(finish_reason=reason))

    def _sequence(self, group: AnswerGroup, placement: Placement) -> worker_pb2.Sequence:
        params = group.params
        if not self._is_first_message or self._request.received:
            # The first message contains the prompt logprobs; later attempts need not compute them again.
            params = replace(params, num_prompt_logprobs=None)
        sequence = to_proto(params, self._request.format)
        sequence.sequence_id, sequence.attempt = group.sequence_id, group.attempt
        sequence.token_ids.extend(group.token_ids)
        sequence.num_output_tokens = len(group.output_token_ids)
        sequence.cache_scope.CopyFrom(worker_pb2.CacheScope(**self._scope._asdict()))
        sequence.weight, sequence.priority = self._weight, self._request.priority
        sequence.waiting_tokens = self._cluster.turns.num_waiting_tokens(self._scope.tenant)
        sequence.load.router_id = self._cluster.workers.router_id
        sequence.load.pending_tokens = placement.pending_tokens
        sequence.load.resident_tokens = placement.resident_tokens
        return sequence

    async def _give_up_attempt(self, group: AnswerGroup, failure: WorkerCallFailed) -> None:
        """Wait before the next attempt, or raise the error for the client if this attempt was the last.

        A failure of the last worker does not count as a retry: the next attempt waits for a worker. A failure
        may be that of a finished answer, which D has continued: then the next attempt is without that answer.
        """
        workers = self._cluster.workers
        if failure.is_death:
            deaths = (*group.deaths, Death.of(failure.worker))
            group.deaths = tuple(death for death in deaths if death.has_lasted)
            group.died_at = self._cluster.clock()
        if failure.is_unreachable:
            workers.set_aside(failure.worker)
        if not failure.is_unreachable or workers.serving("decode"):
            group.num_retries += 1
        is_suspect = failure.is_death and len(group.deaths) >= MAX_DEATHS
        may_retry = failure.is_retryable or any(answer.finish_reason for answer in group.answers)
        is_last = is_suspect or not may_retry or group.num_retries > MAX_RETRIES
        self._account.record_failure(group, failure, is_last=is_last)
        request_id, num_emitted = group.request_id, self.usage.completion_tokens
        if is_suspect:
            dead = ",".join(death.worker.worker_id for death in group.deaths)
            _log.error("request_suspected", **group.names, workers=dead)
            raise suspected(request_id, len(group.deaths), num_emitted, group.num_failures) from failure
        if is_last:
            error = to_service_error(failure, request_id, num_emitted, group.num_failures)
            if isinstance(error, InvalidArgument):
                # Workers always get token ids: name the fields in which the client sent the prompt and words.
                names = {
                    "token_ids": self._request.prompt_field,
                    "sampling.bad_words": self._request.bad_words_field,
                }
                if self._request.division is not None:
                    names["format.grammar"] = self._request.division.format_field
                error = error.renamed(names)
            raise error from failure
        self._choice.record_failure(failure.worker)
        group.attempt += 1
        await asyncio.sleep(RETRY_BACKOFF_SECONDS * group.num_failures)

    def _remaining_seconds(self) -> float:
        remaining = self._deadline - self._cluster.clock()
        if remaining <= 0:
            raise deadline_exceeded(self.usage.completion_tokens)
        return remaining
