"""Places requests: the policy's functions, and what the router has learned and done so far.

Knows no network, so that a simulator places its requests with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from quire.services.router import policy
from quire.services.router.history import PrefixHistory
from quire.services.router.policy import Blocks, Candidate, Estimate, Peer, Policy, PullChoice, Pulls
from quire.services.router.rates import Rates

PREFILL_TOKENS_PER_SECOND = 10_000.0
"""Taken to be usual until a prompt was measured."""
PULL_BYTES_PER_SECOND = 1e9
"""Taken to be usual until a pull was measured."""
HANDOFF_SECONDS = 0.005
"""Taken to be what a decode worker's promise costs until one was measured."""
HANDOFF_SHARE = 0.1
"""Weight of the last promise in the moving average."""
MIN_MEASURED_TOKENS = 64
"""Shorter prompts tell of overheads, not of speed."""
FAILED_PULL_SECONDS = 10.0
"""Charged to a peer for a pull that failed, besides what it took, as if all had come."""
IN_FLIGHT_SECONDS = 5.0
"""So long the index may lag behind a prompt that was sent somewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How requests are placed."""

    policy: Policy = Policy.PRECISE
    pulls: Pulls = Pulls.MEASURED
    local_prefill_tokens: int = 64
    """A decode worker computes up to this many prompt tokens itself, where that is sooner; 0: none."""


class WorkerState(NamedTuple):
    """A live worker and what the router has in flight there."""

    worker_id: str
    num_blocks: int
    owed_tokens: int = 0
    kept_tokens: int = 0
    num_requests: int = 0
    is_shunned: bool = False


class Prompt(NamedTuple):
    """What is to be placed."""

    num_tokens: int
    block_hashes: Sequence[bytes]
    held_tokens: Mapping[str, int] | None
    """Tokens held, by worker id, as the index says; None where it was not asked or did not answer."""
    must_be_local: bool = False
    """The decode worker has to compute it."""


class Placement(NamedTuple):
    """Who serves an attempt, and what is expected of it."""

    decode: policy.DecodeChoice
    prefill: policy.PrefillChoice | None
    """None: the decode worker computes the prompt."""
    estimate: Estimate
    """Of whoever computes the prompt."""
    prompt: Prompt
    sent_at: float

    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        return self.prompt.num_tokens

    @property
    def computing(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill.worker_id if self.prefill else self.decode.worker_id

    @property
    def pull(self) -> PullChoice | None:
        """Whose blocks it copies first."""
        return self.estimate.pull

    @property
    def owed_tokens(self) -> int:
        """What it has to compute."""
        return self.num_tokens - self.estimate.cached_tokens


class PullOutcome(NamedTuple):
    """How a pull went."""

    num_bytes: int = 0
    seconds: float = 0.0
    has_failed: bool = False


class Planner:
    """Places requests and learns from how they went.

    Args:
        blocks: size of the workers' blocks.
        rng: decides what a policy leaves to chance.
    """

    def __init__(
        self,
        config: PolicyConfig,
        blocks: Blocks,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self.config = config
        self._blocks = blocks
        self._clock = clock
        self._rng = rng
        self._prefill_rates = Rates(PREFILL_TOKENS_PER_SECOND, clock)
        self._pull_rates = Rates(PULL_BYTES_PER_SECOND, clock)
        self._handoff_seconds = HANDOFF_SECONDS
        self._history = PrefixHistory(clock)
        self._busy_until: dict[str, float] = {}

    def place(
        self, prompt: Prompt, prefill: Sequence[WorkerState], decode: Sequence[WorkerState]
    ) -> Placement | None:
        """Choose who serves a prompt; None where no decode worker is.

        The choice counts as sent: the next prompt with the same beginning is placed as if it were held.
        """
        key, rule = policy.affinity_key(prompt.block_hashes), self.config.policy
        states = {state.worker_id: state for state in (*prefill, *decode)}
        decoder = policy.choose_decode(
            rule, [self._candidate(state, prompt) for state in decode], prompt.num_tokens, key, self._rng
        )
        if decoder is None:
            return None
        peers = self._peers(prompt, states)
        local = self._estimate(decoder.candidate, prompt, peers)
        remote = None
        if not prompt.must_be_local:
            estimates = [self._estimate(self._candidate(state, prompt), prompt, peers) for state in prefill]
            remote = policy.choose_prefill(rule, estimates, key, self._rng)
        if remote is not None and policy.is_local_sooner(
            local,
            remote.estimate,
            handoff_seconds=self._handoff_seconds,
            num_running=states[decoder.worker_id].num_requests,
            max_tokens=self.config.local_prefill_tokens,
        ):
            remote = None
        estimate = remote.estimate if remote else local
        # A decode worker that waits for a push has nothing yet, and would compute it all a second time.
        self._note(estimate.candidate, prompt)
        return Placement(decoder, remote, estimate, prompt, self._clock())

    def promised(self, seconds: float) -> None:
        """Learn how long a decode worker took to promise a place."""
        self._handoff_seconds += HANDOFF_SHARE * (seconds - self._handoff_seconds)

    def computed(self, placement: Placement, cached_tokens: int, seconds: float, pull: PullOutcome) -> None:
        """Learn from a first token that has just come.

        Args:
            cached_tokens: prompt tokens that were not computed.
            seconds: since the worker was asked.
        """
        worker_id, now = placement.computing, self._clock()
        # First come, first served: it was busy with earlier prompts until their last first token.
        begin = max(now - seconds + pull.seconds, self._busy_until.get(worker_id, 0.0))
        self._busy_until[worker_id] = now
        num_computed = placement.num_tokens - cached_tokens
        if num_computed >= MIN_MEASURED_TOKENS and now > begin:
            self._prefill_rates.add(worker_id, num_computed, now - begin)
        if placement.pull is not None:
            self._pulled(placement.pull, pull)
        self._note(placement.estimate.candidate, placement.prompt)
        self._note(placement.decode.candidate, placement.prompt)

    def forget(self, worker_id: str) -> None:
        """Drop all that is known of a worker that has left."""
        self._history.forget(worker_id)
        self._prefill_rates.forget(worker_id)
        self._pull_rates.forget(worker_id)
        self._busy_until.pop(worker_id, None)

    def _note(self, candidate: Candidate, prompt: Prompt) -> None:
        max_blocks = candidate.capacity_tokens // self._blocks.tokens
        self._history.note(candidate.worker_id, prompt.block_hashes, max_blocks)

    def _pulled(self, choice: PullChoice, pull: PullOutcome) -> None:
        if pull.has_failed:
            num_bytes, seconds = choice.num_blocks * self._blocks.bytes, pull.seconds + FAILED_PULL_SECONDS
            self._pull_rates.add(choice.worker_id, num_bytes, seconds, is_usual=False)
        elif pull.num_bytes:
            seconds = max(pull.seconds - policy.PULL_ROUND_TRIP_SECONDS, pull.seconds / 10)
            self._pull_rates.add(choice.worker_id, pull.num_bytes, seconds)

    def _estimate(self, candidate: Candidate, prompt: Prompt, peers: Sequence[Peer]) -> Estimate:
        return policy.estimate(candidate, prompt.num_tokens, peers, self._blocks, self.config.pulls)

    def _candidate(self, state: WorkerState, prompt: Prompt) -> Candidate:
        return Candidate(
            state.worker_id,
            cached_tokens=self._cached_tokens(state.worker_id, prompt),
            owed_tokens=state.owed_tokens,
            kept_tokens=state.kept_tokens,
            capacity_tokens=max(1, state.num_blocks) * self._blocks.tokens,
            tokens_per_second=self._prefill_rates.get(state.worker_id),
            is_shunned=state.is_shunned,
        )

    def _cached_tokens(self, worker_id: str, prompt: Prompt) -> int:
        """Return the prompt tokens that a worker is believed to hold."""
        held = prompt.held_tokens
        max_age = float("inf") if held is None else IN_FLIGHT_SECONDS
        sent = self._history.num_held(worker_id, prompt.block_hashes, max_age) * self._blocks.tokens
        return sent if held is None else max(sent, held.get(worker_id, 0))

    def _peers(self, prompt: Prompt, states: Mapping[str, WorkerState]) -> list[Peer]:
        """Return who holds something by the index; whoever only will is no help yet."""
        held = prompt.held_tokens or {}
        return policy.best_peers(
            [
                Peer(name, min(num_tokens, prompt.num_tokens), self._pull_rates.get(name))
                for name, num_tokens in held.items()
                if name in states and not states[name].is_shunned
            ]
        )
