"""Chooses the workers of one request's attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from quire.kvindex.block_hash import CacheScope
from quire.kvindex.worker_record import ROLES
from quire.routing.placement import Placement, PlannedPrompt, TooLateError
from quire.routing.policy import CandidateWorker
from quire.rpc.errors import ADAPTER_NOT_LOADED, FailedPrecondition
from quire.services.router.execution.cluster import Cluster
from quire.services.router.execution.failures import no_decode_worker, too_late
from quire.services.router.execution.request_account import RequestAccount
from quire.services.router.execution.worker_calls import NextWorker
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.router.workers.queue import Work
from quire.services.router.workers.tenant_turns import Turn
from quire.services.router.workers.worker import Worker, can_adapt, can_continue
from quire.services.server.log import EventLogger
from quire.services.server.phases import Phase

LATE_FACTOR = 2.0
"""A new request is refused if its first token is expected after this many times its remaining time."""

_log = EventLogger("router")


@dataclass(eq=False)
class WorkerChoice:
    """Chooses by the workers' cached blocks and load, and prefers workers that have not failed.

    While no decode worker accepts requests, requests wait for one (``workers/queue.py``).

    Args:
        scope: which requests may share the blocks.
        arrival: when the request arrived, a reading of the clock, plus its patience.
        remaining_seconds: returns the time until the request's deadline, or raises DeadlineExceeded.
        weight: weight of its tenant.
        descriptor: cache descriptor of the workers that began the answers; empty if none did.

    Attributes:
        descriptor: that of the latest attempt's workers. An answer that has begun keeps its weights.
    """

    cluster: Cluster
    scope: CacheScope
    account: RequestAccount
    arrival: float
    remaining_seconds: Callable[[], float]
    weight: int = 1
    descriptor: bytes = b""

    def __post_init__(self) -> None:
        self._failed: set[str] = set()
        self._turn: Turn | None = None
        self._has_had_turn = False
        self._beginning = asyncio.Lock()
        """Held while the request waits for its turn; answers that continue separately share one."""

    def record_failure(self, worker: Worker) -> None:
        """Prefer other workers from now on, since a call to this one has failed."""
        self._failed.add(worker.worker_id)

    async def aclose(self) -> None:
        """Let requests of other tenants begin: this one has its first tokens, or has ended."""
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    async def choose(self, group: AnswerGroup, next_worker: NextWorker | None) -> Placement:
        """Return the workers of a group's next attempt, as soon as a decode worker accepts requests.

        Args:
            next_worker: the decode worker, if it accepts requests; None: the planner chooses.

        Raises:
            Unavailable: no worker accepted requests within the longest wait.
            ResourceExhausted: the first token is expected long after the deadline.
            DeadlineExceeded: the deadline has passed.
            FailedPrecondition: no decode worker has the adapter.
        """
        cluster = self.cluster
        while True:
            await self._wait(group)
            await self._begin(len(group.token_ids))
            if group.deaths:
                # A worker that was killed together with the last one says nothing about this request.
                await cluster.workers.ask_again(group.died_at)
            # The last worker may leave while the prefix is looked up.
            if (placement := await self._place(group, next_worker)) is not None:
                self._record(group, placement)
                return placement
            await self.aclose()

    async def _wait(self, group: AnswerGroup) -> None:
        """Wait until a decode worker accepts requests."""
        cluster = self.cluster
        try:
            work = Work(self.scope.tenant, len(group.token_ids), self.weight, self._begun_by(group))
            await cluster.queue.turn(self.arrival, self.remaining_seconds(), work)
        except TimeoutError:
            self.remaining_seconds()
            metadata = {"tokens_emitted": str(self.account.usage.completion_tokens)}
            raise no_decode_worker(cluster.workers, metadata) from None

    async def _begin(self, num_tokens: int) -> None:
        """Wait for the request's turn, unless it had one."""
        turns, tenant = self.cluster.turns, self.scope.tenant
        async with self._beginning:
            if self._has_had_turn:
                return
            start = self.cluster.clock()
            while not self._has_had_turn:
                with suppress(TimeoutError):
                    self._turn = await turns.begin(
                        tenant, self.weight, num_tokens, self.arrival, self.remaining_seconds()
                    )
                    self._has_had_turn = True
            self.account.phases.record(Phase.TURN, start, self.cluster.clock())

    async def _look_up(self, group: AnswerGroup) -> PlannedPrompt:
        workers = [worker for role in ROLES for worker in self._serving(role, group)]
        descriptors = dict.fromkeys(worker.info.cache_descriptor for worker in workers) or [self.descriptor]
        return await self.cluster.prefixes.look_up(group.token_ids, self.scope, descriptors)

    async def _place(self, group: AnswerGroup, next_worker: NextWorker | None) -> Placement | None:
        """Return the workers that the planner chooses, or None if no decode worker accepts requests."""
        cluster = self.cluster
        start = cluster.clock()
        self._check_adapter(group)
        only = next_worker
        if only is not None and not (only.worker.can_serve and can_adapt(only.worker, self.scope.adapter)):
            only = None
        if only is None:
            prompt = await self._look_up(group)
        else:
            cached = {only.worker.worker_id: only.num_cached_tokens}
            prompt = PlannedPrompt(len(group.token_ids), (), cached)
        looked_up = cluster.clock()
        self.account.phases.record(Phase.LOOKUP, start, looked_up)
        if group.deaths:
            await cluster.suspects.turn(lambda: self._healthy_decode_workers(group))
        # With several answers P does not compute the prompt's last token, and its logprob would be lost.
        is_scored = not group.is_single and group.params.num_prompt_logprobs is not None
        prompt = prompt._replace(
            must_be_local=is_scored or group.num_prefilled_tokens == 0,
            max_output_tokens=group.params.max_tokens - len(group.output_token_ids),
            num_answers=len(group.answers),
            # A request that has begun is tried until its deadline, because estimates are not exact.
            max_seconds=inf if group.attempt else LATE_FACTOR * self.remaining_seconds(),
        )
        try:
            placement = cluster.planner.place(
                prompt,
                self._candidates("prefill", group) if only is None else [],
                self._candidates("decode", group, only.worker if only else None),
            )
        except TooLateError as error:
            cluster.metrics.rejections.labels("too_late").inc()
            raise too_late(error.seconds, self.remaining_seconds()) from None
        if placement is None:
            return None
        self.account.phases.record(Phase.CHOOSE, looked_up, cluster.clock())
        return placement

    def _record(self, group: AnswerGroup, placement: Placement) -> None:
        """Count and log the chosen workers and the reasons for the choice."""
        decode, prefill, estimate = placement.decode, placement.prefill, placement.estimate
        metrics = self.cluster.metrics
        metrics.decisions.labels("decode", placement.decode_reason).inc()
        metrics.decisions.labels("prefill", placement.prefill_reason or "none").inc()
        if not group.attempt:
            metrics.prompt_tokens_predicted.inc(estimate.cached_tokens)
        _log.debug(
            "request_dispatched",
            **group.names,
            decode=decode.worker_id,
            decode_reason=placement.decode_reason,
            prefill=prefill.worker_id if prefill else "none",
            prefill_reason=placement.prefill_reason or "none",
            prompt_tokens=placement.num_tokens,
            cached_tokens=estimate.cached_tokens,
            queue_seconds=estimate.queue_seconds,
            compute_seconds=estimate.compute_seconds,
            pull_from=estimate.peer.worker_id if estimate.peer else "none",
            pull_blocks=estimate.peer.num_blocks if estimate.peer else 0,
            pull_seconds=estimate.pull_seconds,
        )

    def _is_unhealthy(self, worker: Worker) -> bool:
        return worker.health.is_unhealthy or worker.worker_id in self._failed

    def _serving(self, role: str, group: AnswerGroup) -> list[Worker]:
        """Return the workers that may get a group; for a suspect, those that answered after the death."""
        return [
            each
            for each in self._able(role, group)
            if can_adapt(each, self.scope.adapter)
            and (not group.deaths or each.health.answered_at >= group.died_at)
        ]

    def _begun_by(self, group: AnswerGroup) -> bytes:
        """Return the cache descriptor of the workers that began a group's answers; empty if none did."""
        has_begun = self.account.usage.completion_tokens or any(each.token_ids for each in group.answers)
        return self.descriptor if has_begun else b""

    def _able(self, role: str, group: AnswerGroup) -> list[Worker]:
        """Return the workers that accept requests and may serve a group: if it has begun, of its revision.

        If that has no decode worker, workers with the same weights, whose arithmetic is another, continue it.
        """
        workers = self.cluster.workers
        if not (descriptor := self._begun_by(group)):
            return workers.serving(role)
        able = [each for each in workers.serving() if can_continue(each.info, descriptor)]
        own = [each for each in able if each.info.cache_descriptor == descriptor]
        if any(each.role == "decode" for each in own):
            able = own
        return [each for each in able if each.role == role]

    def _check_adapter(self, group: AnswerGroup) -> None:
        """Raise FailedPrecondition if decode workers take requests, and none has the adapter of this one."""
        serving = self._able("decode", group)
        if serving and not any(can_adapt(each, self.scope.adapter) for each in serving):
            raise FailedPrecondition(
                f"no decode worker has the adapter with the digest {self.scope.adapter} any more; "
                "load it again with `quire admin add-adapter`",
                reason=ADAPTER_NOT_LOADED,
            )

    def _healthy_decode_workers(self, group: AnswerGroup) -> list[str]:
        serving = self._serving("decode", group)
        return [worker.worker_id for worker in serving if not self._is_unhealthy(worker)]

    def _candidates(self, role: str, group: AnswerGroup, only: Worker | None = None) -> list[CandidateWorker]:
        """Return the workers of a role that accept requests, or only ``only`` if it is given."""
        suspects, block_size = self.cluster.suspects, self.cluster.model.block_size
        return [
            CandidateWorker(
                worker.worker_id,
                capacity_tokens=max(1, worker.info.num_blocks) * block_size,
                pending_tokens=worker.pending_before(self.scope.tenant, len(group.token_ids)),
                resident_tokens=worker.resident_tokens + worker.load_of_others.resident_tokens,
                num_requests=worker.num_requests + worker.load_of_others.num_requests,
                is_unhealthy=self._is_unhealthy(worker)
                or bool(group.deaths and suspects.is_near(worker.worker_id)),
                revision=worker.revision,
            )
            for worker in self._serving(role, group)
            if only is None or worker is only
        ]
