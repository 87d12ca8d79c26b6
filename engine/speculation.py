"""Speculative decoding: propose draft tokens and verify them in one step (Leviathan et al., 2023).

A step computes a sequence's last token and its draft tokens together. The token at each position is then
sampled from the model's logits as usual, with that position's own random number. As long as it equals the
draft token, the logits after the draft token are those of the sequence itself, and the next token is sampled
from them. So the tokens are the same as without speculation, for every kind of sampling. A wrong draft token
costs only time.

The number of draft tokens that are worth their time is measured. One more token in a step costs
``token_seconds``. In this time the engine would generate ``token_seconds * tokens_per_second`` tokens. A
draft token pays off if its probability of being right is higher than that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from quire.engine.sequence import Sequence
from quire.engine.sequence_group import SequenceGroup
from quire.engine.stop_rules import StopRules

_KEEP = 0.95
"""Factor by which the weight of older measurements falls with each new one."""
_PRIOR_TRIALS = 4.0
"""Weight of the acceptance rate of all sequences, in trials of a sequence's own."""
_EXPLORE_EVERY = 64
"""Number of steps after which one step does the opposite: it drafts only where no draft token pays off.

Otherwise the costs and acceptance rates of the other choice would never be measured.
"""


class DraftRequest(NamedTuple):
    """A sequence that is computed except for its last token, and how many draft tokens to propose for it."""

    sequence: Sequence
    num_tokens: int


def draft_requests(groups: Iterable[SequenceGroup], stop_rules: StopRules) -> list[DraftRequest]:
    """Return requests for the most draft tokens that sequences could use, for those that decode."""
    return [
        DraftRequest(sequence, num_tokens)
        for group in groups
        if _takes_drafts(group)
        for sequence in group.sequences
        if sequence.num_tokens == sequence.num_computed_tokens + 1
        # A step samples one token after the last draft token.
        and (num_tokens := stop_rules.num_tokens_left(sequence) - 1) > 0
    ]


def _takes_drafts(group: SequenceGroup) -> bool:
    """Return whether the sequences of a group may get draft tokens once they decode."""
    prompt, params = group.prompt, group.params
    if group.beam is not None or not prompt.samples_tokens or prompt.stops_after_prefill:
        return False
    # With a KV budget each token decides which blocks are evicted.
    return prompt.kv_budget is None and (group.is_forked or params.n == 1)


class Proposer(Protocol):
    """Proposes draft tokens."""

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """Return draft tokens for each sequence: at most its ``num_tokens``, perhaps none."""


class SpeculationCounts(NamedTuple):
    """Number of draft tokens so far, and how many of them were accepted."""

    drafted: int
    accepted: int


@dataclass(slots=True)
class Acceptance:
    """How often draft tokens are right, with exponentially falling weights for the past."""

    hits: float = 0.0
    trials: float = 0.0

    def record_verification(self, num_drafted: int, num_accepted: int) -> None:
        """Record a verification; draft tokens after the first wrong one do not count as trials."""
        self.hits = _KEEP * self.hits + num_accepted
        self.trials = _KEEP * self.trials + min(num_accepted + 1, num_drafted)

    def rate(self, prior: float) -> float:
        """Return the probability that a draft token is right if those before it are.

        Args:
            prior: the probability that is assumed without any trials.
        """
        return (self.hits + _PRIOR_TRIALS * prior) / (self.trials + _PRIOR_TRIALS)


class StepCost:
    """The cost of one more token in a step: the slope of seconds over tokens, fitted to recent steps."""

    def __init__(self) -> None:
        self.token_seconds = 0.0
        self._weight = self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of a step's forward pass."""
        # A running fit (Welford's update) with exponentially falling weights.
        self._weight = _KEEP * self._weight + 1.0
        off_tokens, off_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += off_tokens / self._weight
        self._seconds += off_seconds / self._weight
        self._variance = _KEEP * self._variance + off_tokens * (num_tokens - self._tokens)
        self._covariance = _KEEP * self._covariance + off_tokens * (seconds - self._seconds)
        # The slope is undefined while all steps have the same number of tokens.
        if self._variance > 1.0:
            highest = self._seconds / self._tokens
            self.token_seconds = min(max(self._covariance / self._variance, 0.0), highest)


class Speculator:
    """Decides how many draft tokens each sequence gets, and measures how often they are right.

    Args:
        proposer: proposes the draft tokens.
        num_tokens: most draft tokens for one sequence in one step.
        clock: returns seconds, to measure the cost of drafting; a constant clock makes drafting free.
    """

    def __init__(
        self, proposer: Proposer, num_tokens: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.counts = SpeculationCounts(0, 0)
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._clock = clock
        self._all = Acceptance()
        self._acceptance: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()
        self._cost = StepCost()
        self._draft_seconds = 0.0
        """Running mean of the seconds to propose one draft token."""
        self._tokens_per_second = 0.0
        self._num_steps = 0

    def propose(self, requests: list[DraftRequest]) -> None:
        """Propose draft tokens and store them in the sequences' ``draft_token_ids``.

        Args:
            requests: the sequences, and the most draft tokens for each.
        """
        self._num_steps += 1
        lengths = [min(each.num_tokens, self._length(each.sequence)) for each in requests]
        if self._num_steps % _EXPLORE_EVERY == 0:
            lengths = [int(length == 0) for length in lengths]
        requests = [
            DraftRequest(each.sequence, length)
            for each, length in zip(requests, lengths, strict=True)
            if length
        ]
        if not requests:
            return
        start = self._clock()
        drafts = self._proposer.propose(requests)
        self._record_drafting(sum(map(len, drafts)), self._clock() - start)
        for each, draft in zip(requests, drafts, strict=True):
            each.sequence.draft_token_ids = draft

    def _record_drafting(self, num_drafted: int, seconds: float) -> None:
        if num_drafted and self._tokens_per_second:
            # Above this limit no draft token pays off, so higher values are clipped. A single delay then
            # affects the mean only for a few steps.
            longest = 2.0 / self._tokens_per_second
            self._draft_seconds = _mean(self._draft_seconds, min(seconds / num_drafted, longest))

    def _length(self, sequence: Sequence) -> int:
        """Return how many draft tokens of a sequence pay off."""
        least = (self._cost.token_seconds + self._draft_seconds) * self._tokens_per_second
        own = self._acceptance.get(sequence, Acceptance())
        rate = own.rate(self._all.rate(1.0))
        if least <= 0.0 or rate >= 1.0:
            return self._num_tokens
        if least >= 1.0:
            return 0
        return min(self._num_tokens, int(math.log(least) / math.log(rate)))

    def record_verification(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a sequence's draft tokens were right."""
        self._acceptance.setdefault(sequence, Acceptance()).record_verification(num_drafted, num_accepted)
        self._all.record_verification(num_drafted, num_accepted)
        drafted, accepted = self.counts
        self.counts = SpeculationCounts(drafted + num_drafted, accepted + num_accepted)

    def record_step(self, num_tokens: int, num_sampled: int, forward_seconds: float, seconds: float) -> None:
        """Record a step in which every sequence decoded.

        Args:
            num_tokens: tokens that the step computed.
            num_sampled: tokens that it sampled.
            forward_seconds: time of its forward pass.
            seconds: time of the whole step.
        """
        self._cost.record_step(num_tokens, forward_seconds)
        if seconds > 0.0:
            self._tokens_per_second = _mean(self._tokens_per_second, num_sampled / seconds)


def _mean(before: float, latest: float) -> float:
    return latest if before == 0.0 else 0.8 * before + 0.2 * latest
