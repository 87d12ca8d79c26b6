"""Records the tokens, blocks and times of one request, for its client, the metrics and the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import grpc

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.routing.placement import Placement, Planner, PullOutcome
from quire.services.router.execution.failures import WorkerCallFailed
from quire.services.router.execution.token_charge import RequestCharge
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.server.log import EventLogger
from quire.services.server.phases import Phase, RequestPhases

_log = EventLogger("router")


class RequestAccount:
    """Counts over all attempts of a request; the client gets ``usage``."""

    def __init__(
        self,
        metrics: RouterMetrics,
        phases: RequestPhases,
        planner: Planner,
        clock: Callable[[], float],
        num_prompt_tokens: int,
        charge: RequestCharge,
    ) -> None:
        self._metrics = metrics
        self.phases = phases
        self._planner = planner
        self.clock = clock
        self._is_cache_counted = False
        self.charge = charge
        self.usage = pb.Usage(prompt_tokens=num_prompt_tokens)
        self.prompt_logprobs: Sequence[pb.TokenLogprobs] = ()

    def record_workers(self, labels: Iterable[str]) -> None:
        """Name the workers of an attempt."""
        self.usage.workers.extend(label for label in labels if label not in self.usage.workers)

    def record_tokens(self, num_tokens: int, num_accepted_draft_tokens: int) -> None:
        """Count new tokens of an answer; a stop string may have removed some of the accepted ones."""
        self.usage.completion_tokens += num_tokens
        self.usage.accepted_draft_tokens += min(num_tokens, num_accepted_draft_tokens)
        self._metrics.generation_tokens.inc(num_tokens)

    def record_promise(self, start: float) -> None:
        """Count the time since ``start`` until D's promise to take the blocks of a prompt that P computes."""
        now = self.clock()
        self.phases.record(Phase.ACCEPT, start, now)
        self._planner.record_promise(now - start)

    def record_local_prefill(
        self,
        group: AnswerGroup,
        placement: Placement,
        message: worker_pb2.DecodeResponse,
        block_size: int,
        start: float,
    ) -> None:
        """Count the cached tokens of a prompt that D has computed itself since ``start``."""
        accepted = message.accepted
        self.prompt_logprobs = message.prompt_logprobs
        self._record_cached(accepted.num_cached_tokens, accepted.pulled)
        num_cached = accepted.num_cached_tokens // block_size
        self.usage.blocks_reused_on_decode = max(0, num_cached - accepted.pulled.num_blocks)
        self.record_computed(group, placement, accepted, start)

    def record_prefill(self, message: worker_pb2.PrefillResponse) -> None:
        """Count the pushed blocks if this is P's summary of the push, or else P's cached tokens."""
        if message.HasField("pushed"):
            self.usage.blocks_shipped += message.pushed.num_blocks
            self.usage.bytes_shipped += message.pushed.num_bytes
            self.usage.blocks_reused_on_decode = message.pushed.num_held_blocks
        else:
            self.prompt_logprobs = message.prompt_logprobs
            self._record_cached(message.num_cached_tokens, message.pulled)

    def record_computed(
        self,
        group: AnswerGroup,
        placement: Placement,
        message: worker_pb2.PrefillResponse | worker_pb2.Accepted,
        start: float,
    ) -> None:
        """Record expected and measured values, and update the planner, when the prompt has been computed.

        Only a first attempt is charged its computed tokens, because quire causes any later repetition.

        Args:
            start: reading of the clock when the worker was called.
        """
        if not group.attempt:
            self.charge.add_prompt(placement.num_tokens - message.num_cached_tokens)
        pulled, now = message.pulled, self.clock()
        if placement.estimate.peer is not None:
            self._metrics.pulls.labels(pulled.failure or "ok").inc()
        # Without free blocks a worker cannot pull from any peer.
        has_failed = pulled.failure not in ("", "no_blocks")
        outcome = PullOutcome(pulled.num_bytes, pulled.seconds, pulled.transfer_seconds, has_failed)
        self._planner.record_prefill(placement, message.num_cached_tokens, now - start, outcome)
        taken = now - placement.sent_at
        tokens, seconds = self._metrics.expected_tokens, self._metrics.expected_seconds
        tokens.labels("expected").inc(placement.estimate.cached_tokens)
        tokens.labels("found").inc(message.num_cached_tokens)
        seconds.labels("expected").inc(placement.estimate.seconds)
        seconds.labels("taken").inc(taken)
        _log.debug(
            "request_computed",
            worker=placement.computing,
            expected_cached_tokens=placement.estimate.cached_tokens,
            cached_tokens=message.num_cached_tokens,
            expected_seconds=placement.estimate.seconds,
            seconds=taken,
        )

    def record_failure(self, group: AnswerGroup, failure: WorkerCallFailed, *, is_last: bool) -> None:
        """Log a failed attempt; unless it is the last, count the next one."""
        worker, code = failure.worker, failure.code.name
        # An operator can do nothing about a client's mistake, even if only the worker could detect it.
        is_clients = failure.code is grpc.StatusCode.INVALID_ARGUMENT
        (_log.debug if is_clients else _log.warning)(
            "attempt_failed",
            **group.names,
            worker=worker.worker_id,
            role=worker.role,
            code=code,
            details=failure.details,
            tokens_emitted=self.usage.completion_tokens,
            is_last=is_last,
        )
        if not is_last:
            # Answers that were lost together and continue separately count as one retry.
            self.usage.retries = max(self.usage.retries, group.num_failures + 1)
            self._metrics.retries.labels(worker.role, code.lower()).inc()

    def _record_cached(self, num_cached_tokens: int, pulled: worker_pb2.PullSummary) -> None:
        # Later attempts find blocks that the first one computed, so only the first attempt's figure counts.
        if not self._is_cache_counted:
            self._is_cache_counted = True
            self.usage.cached_prompt_tokens = min(num_cached_tokens, self.usage.prompt_tokens)
            self._metrics.prompt_tokens_cached.inc(self.usage.cached_prompt_tokens)
        self.usage.blocks_pulled += pulled.num_blocks
        self.usage.bytes_pulled += pulled.num_bytes
