"""Places requests: applies the policy's functions to what the router has measured and sent so far.

The module does no network calls, so the simulator places its requests with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from quire.routing import policy, pulls
from quire.routing.history import PrefixHistory
from quire.routing.policy import CandidateWorker, Estimate, Policy, Reason, receiving
from quire.routing.pulls import Blocks, Peer, Pulls
from quire.routing.rates import Rates
from quire.settings.setting import Panel, check_settings, setting

PREFILL_TOKENS_PER_SECOND = 10_000.0
"""Assumed prefill rate of a worker until the first prompt has been measured."""
PULL_BYTES_PER_SECOND = 1e9
"""Assumed bandwidth of a pull from a peer until one has been measured, and again some minutes later."""
HANDOFF_SECONDS = 0.005
"""Assumed time until a decode worker promises a place, used until the first promise has been measured."""
HANDOFF_SHARE = 0.1
"""Weight of the newest promise in the moving average of their times."""
ANSWER_TOKENS = 256.0
"""Initial value of the average length of an answer, in tokens."""
ANSWER_SHARE = 0.05
"""Weight of the newest answer in the moving average of their lengths."""
MIN_MEASURED_TOKENS = 64
"""Minimum number of computed tokens for a measurement; shorter prompts measure overhead, not speed."""
MIN_MEASURED_BYTES = 1 << 20
"""Minimum number of copied bytes for a measurement; smaller pulls measure overhead, not bandwidth."""
FAILED_PULL_SECONDS = 10.0
"""Time after a failed pull in which no other pull from the peer begins."""
IN_FLIGHT_SECONDS = 5.0
"""Longest time that the index is expected to lag behind a prompt that was sent to a worker."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Settings that decide how requests are placed.

    Attributes:
        policy: what a choice depends on; the other one is for comparisons.
        pulls: when blocks are copied from peers; for comparisons, too.

    Raises:
        ValueError: a setting is out of range.
    """

    policy: Policy = Policy.PRECISE
    pulls: Pulls = Pulls.MEASURED
    local_prefill_tokens: int = setting(
        64,
        "--local-prefill-tokens",
        "A decode worker computes up to this many prompt tokens itself, where that is sooner; 0 for none.",
        Panel.ROUTING,
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)


class TooLateError(Exception):
    """The first token is expected only after the prompt's ``max_seconds``.

    Attributes:
        seconds: expected time until the first token, from now on.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the first token is expected after {seconds:.1f} s")
        self.seconds = seconds


class PlannedPrompt(NamedTuple):
    """A prompt to be placed."""

    num_tokens: int
    block_hashes: Sequence[bytes]
    cached_by_worker: Mapping[str, int] | None
    """Cached tokens by worker id, according to the index; None if it was not asked or did not answer."""
    must_be_local: bool = False
    """Whether the decode worker has to compute the prompt."""
    max_output_tokens: int = 0
    """Maximum number of tokens of each answer."""
    num_answers: int = 1
    max_seconds: float = float("inf")
    """Longest time until the first token that is worth an attempt."""


class Placement(NamedTuple):
    """The workers chosen for an attempt, and the reasons for the choice."""

    decode: CandidateWorker
    decode_reason: Reason
    prefill_reason: Reason | None
    """None: the decode worker computes the prompt."""
    estimate: Estimate
    """Estimate for the worker that computes the prompt."""
    prompt: PlannedPrompt
    sent_at: float
    resident_tokens: int
    """Tokens that the decode worker will keep blocks for: the prompt's and the expected answers'."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return self.prompt.num_tokens

    @property
    def prefill(self) -> CandidateWorker | None:
        """The prefill worker; None: the decode worker computes the prompt."""
        return self.estimate.candidate if self.prefill_reason else None

    @property
    def computing(self) -> str:
        """Id of the worker that computes the prompt."""
        return self.estimate.candidate.worker_id

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that this worker has to compute, because they are neither cached nor pulled."""
        return self.num_tokens - self.estimate.cached_tokens


@dataclass(slots=True)
class PromptWork:
    """Expected compute time of all prompts that were placed, in seconds.

    Attributes:
        remote_seconds: of the prompts that prefill workers compute.
        local_seconds: of the prompts that decode workers compute themselves.
    """

    num_prompts: int = 0
    remote_seconds: float = 0.0
    local_seconds: float = 0.0

    def add(self, seconds: float, *, is_local: bool) -> None:
        """Count a prompt."""
        self.num_prompts += 1
        if is_local:
            self.local_seconds += seconds
        else:
            self.remote_seconds += seconds


class PullOutcome(NamedTuple):
    """Result of a pull: what was copied, how long it took, and whether it failed."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Total time, with waiting for the engines of both workers."""
    transfer_seconds: float = 0.0
    """Part of it in which the bytes were transferred."""
    has_failed: bool = False


@dataclass(eq=False)
class Planner:
    """Places requests, and learns rates and lengths from their outcomes.

    Attributes:
        blocks: size of the workers' blocks.
        rng: source of the random choices that a policy makes.
    """

    config: PolicyConfig
    blocks: Blocks
    clock: Callable[[], float]
    rng: Random

    def __post_init__(self) -> None:
        self._prefill_rates = Rates(PREFILL_TOKENS_PER_SECOND, self.clock)
        self._pull_rates = Rates(PULL_BYTES_PER_SECOND, self.clock)
        self._handoff_seconds = HANDOFF_SECONDS
        self._answer_tokens = ANSWER_TOKENS
        self._history = PrefixHistory(self.clock)
        self._busy_until: dict[str, float] = {}
        self._pull_again_at: dict[str, float] = {}
        self._present: set[str] = set()
        """Workers that prompts were placed among, and that have not left."""
        self.work = PromptWork()

    def place(
        self, prompt: PlannedPrompt, prefill: Sequence[CandidateWorker], decode: Sequence[CandidateWorker]
    ) -> Placement | None:
        """Choose the workers for a prompt, both of one revision; return None if there is no decode worker.

        The prompt counts as sent: the next prompt with the same beginning is placed as if the chosen worker
        had already cached it.

        Raises:
            TooLateError: the first token is expected after the prompt's ``max_seconds``.
        """
        # Prompts shorter than a block share no prefix. If they all had the same key, one worker would win
        # every tie.
        key = policy.affinity_key(prompt.block_hashes) or self.rng.randbytes(8)
        rule = self.config.policy
        self._present.update(worker.worker_id for worker in (*prefill, *decode))
        revisions = self._without_jams(prefill, decode)
        growth = prompt.num_answers * min(prompt.max_output_tokens, round(self._answer_tokens))
        resident_tokens = prompt.num_tokens + growth
        choice = policy.choose_decode(
            rule,
            [self._candidate(worker, prompt) for worker in decode if worker.revision in revisions],
            resident_tokens,
            key,
            self.rng,
        )
        if choice is None:
            return None
        decoder, decode_reason = choice
        prefill = [worker for worker in prefill if worker.revision == decoder.revision]
        workers = (*prefill, *(worker for worker in decode if worker.revision == decoder.revision))
        peers = self._peers(prompt, {worker.worker_id: worker for worker in workers})
        local = self._estimate(decoder, prompt, peers)
        remote = None
        if not prompt.must_be_local:
            estimates = [self._estimate(self._candidate(worker, prompt), prompt, peers) for worker in prefill]
            remote = policy.choose_prefill(rule, estimates, key, self.rng)
        if remote is not None and policy.is_local_sooner(
            local,
            remote[0],
            handoff_seconds=self._handoff_seconds,
            num_running=decoder.num_requests,
            max_tokens=self.config.local_prefill_tokens,
        ):
            remote = None
        estimate, prefill_reason = remote or (local, None)
        if estimate.seconds > prompt.max_seconds:
            raise TooLateError(estimate.seconds)
        # Record only the worker that computes the prompt. A decode worker that waits for a push has no blocks
        # yet: if it were chosen for its prefix now, it would compute the whole prompt a second time.
        self._note(estimate.candidate, prompt)
        self.work.add(estimate.compute_seconds, is_local=remote is None)
        return Placement(
            decoder, decode_reason, prefill_reason, estimate, prompt, self.clock(), resident_tokens
        )

    def _without_jams(
        self, prefill: Sequence[CandidateWorker], decode: Sequence[CandidateWorker]
    ) -> set[str]:
        """Return the revisions that receive requests, without those whose prefill workers are all too late.

        The decode workers of a revision may have room while it has too few prefill workers, as when these
        start later.
        """
        revisions = receiving([each.revision for each in prefill], [each.revision for each in decode])
        queues = [
            policy.Estimate(
                each, self.pending_seconds(each.worker_id, each.pending_tokens), None, 0.0, 0.0, 0
            )
            for each in prefill
            if each.revision in revisions
        ]
        if len(revisions) == 1 or not queues:
            return set(revisions)
        return {each.candidate.revision for each in policy.without_jams(queues)}

    def pending_seconds(self, worker_id: str, num_tokens: int) -> float:
        """Return the expected time in which a worker computes this number of prompt tokens."""
        return num_tokens / self._prefill_rates.get(worker_id)

    def record_answer(self, num_tokens: int) -> None:
        """Update the average answer length with the length of a finished answer, in tokens."""
        self._answer_tokens += ANSWER_SHARE * (num_tokens - self._answer_tokens)

    def record_promise(self, seconds: float) -> None:
        """Update the average time until a decode worker promises a place, in seconds."""
        self._handoff_seconds += HANDOFF_SHARE * (seconds - self._handoff_seconds)

    def record_prefill(
        self, placement: Placement, cached_tokens: int, seconds: float, pull: PullOutcome
    ) -> None:
        """Update the rates when the first token of a prompt has just arrived.

        Workers that have left are ignored: a prompt that they still compute may end later.

        Args:
            cached_tokens: prompt tokens that were not computed.
            seconds: time since the worker was called.
        """
        peer = placement.estimate.peer
        if peer is not None and peer.worker_id in self._present:
            self._pulled(peer, pull)
        for candidate in (placement.estimate.candidate, placement.decode):
            if candidate.worker_id in self._present:
                self._note(candidate, placement.prompt)
        worker_id, now = placement.computing, self.clock()
        if worker_id not in self._present:
            return
        # Workers serve prompts in order of arrival, so this worker was busy with earlier prompts until the
        # first token of the last of them.
        begin = max(now - seconds + pull.seconds, self._busy_until.get(worker_id, 0.0))
        self._busy_until[worker_id] = now
        num_computed = placement.num_tokens - cached_tokens
        if num_computed >= MIN_MEASURED_TOKENS and now > begin:
            self._prefill_rates.add(worker_id, num_computed, now - begin)

    def forget(self, worker_id: str) -> None:
        """Drop the history and the rates of a worker that has left."""
        self._history.forget(worker_id)
        self._prefill_rates.forget(worker_id)
        self._pull_rates.forget(worker_id)
        self._busy_until.pop(worker_id, None)
        self._pull_again_at.pop(worker_id, None)
        self._present.discard(worker_id)

    def _note(self, candidate: CandidateWorker, prompt: PlannedPrompt) -> None:
        max_blocks = candidate.capacity_tokens // self.blocks.tokens
        self._history.note(candidate.worker_id, prompt.block_hashes, max_blocks)

    def _pulled(self, peer: Peer, pull: PullOutcome) -> None:
        if pull.has_failed:
            self._pull_again_at[peer.worker_id] = self.clock() + FAILED_PULL_SECONDS
        elif pull.num_bytes >= MIN_MEASURED_BYTES and pull.transfer_seconds > 0:
            # The initial rate stays the average. If the pulls from all peers were slow, a lower average would
            # forbid each further pull, and with it each measurement that could show that they are fast again.
            self._pull_rates.add(peer.worker_id, pull.num_bytes, pull.transfer_seconds, is_usual=False)

    def _estimate(self, candidate: CandidateWorker, prompt: PlannedPrompt, peers: Sequence[Peer]) -> Estimate:
        return policy.estimate(candidate, prompt.num_tokens, peers, self.blocks, self.config.pulls)

    def _candidate(self, worker: CandidateWorker, prompt: PlannedPrompt) -> CandidateWorker:
        return worker._replace(
            cached_tokens=self._cached_tokens(worker.worker_id, prompt),
            tokens_per_second=self._prefill_rates.get(worker.worker_id),
        )

    def _cached_tokens(self, worker_id: str, prompt: PlannedPrompt) -> int:
        """Return how many prompt tokens a worker probably has cached, by the index and by recent requests."""
        cached = prompt.cached_by_worker
        max_age = float("inf") if cached is None else IN_FLIGHT_SECONDS
        sent = self._history.num_cached(worker_id, prompt.block_hashes, max_age) * self.blocks.tokens
        return sent if cached is None else max(sent, cached.get(worker_id, 0))

    def _peers(self, prompt: PlannedPrompt, workers: Mapping[str, CandidateWorker]) -> list[Peer]:
        """Return the peers that have blocks of the prompt, according to the index, and can be pulled from.

        Workers that are still computing the prefix cannot be pulled from, so the history is not used here.
        """
        cached, now = prompt.cached_by_worker or {}, self.clock()
        return pulls.best_peers(
            [
                Peer(
                    name,
                    min(num_tokens, prompt.num_tokens) // self.blocks.tokens,
                    self._pull_rates.get(name),
                )
                for name, num_tokens in cached.items()
                if name in workers
                and not workers[name].is_unhealthy
                and self._pull_again_at.get(name, now) <= now
            ]
        )
