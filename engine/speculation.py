"""Speculative decoding: guess the next tokens, and verify the guesses in one step (Leviathan et al., 2023).

A step computes a sequence's last token and its guesses at once. The token at each position is then drawn from
the model's logits as always, with that position's own random number; while it equals the guess, the logits
after the guess are those of the sequence itself, and the next token is drawn from them. So the tokens are the
same as without guesses, for every kind of sampling, and a guess costs time alone.

How many guesses are worth their time is measured. One more token in a step costs ``token_seconds``, in which
the engine makes ``token_seconds * tokens_per_second`` tokens as it runs: a guess pays if it is right with a
higher probability than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from quire.engine.sequence import Sequence

_KEEP = 0.95
"""Of the evidence on how often guesses are right, after a step."""
_PRIOR_TRIALS = 4.0
"""What a new sequence's guesses are worth by those of all sequences, in trials of its own."""
_EXPLORE_EVERY = 64
"""Every so many steps do the opposite, or what it would cost or bring stays unknown."""


class Wanted(NamedTuple):
    """A sequence that is computed but for its last token, and how many tokens to guess for it."""

    sequence: Sequence
    num_tokens: int


class Proposer(Protocol):
    """Guesses tokens."""

    def propose(self, wanted: list[Wanted]) -> list[list[int]]:
        """Return, for each sequence, the tokens that may come next: at most as many as wanted, or none."""


class SpeculationCounts(NamedTuple):
    """Guesses so far, and how many of them were right."""

    drafted: int
    accepted: int


@dataclass(slots=True)
class Acceptance:
    """How often guesses are right, forgetting the past little by little."""

    hits: float = 0.0
    trials: float = 0.0

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Note a verification: the first wrong guess hides those after it."""
        self.hits = _KEEP * self.hits + num_accepted
        self.trials = _KEEP * self.trials + min(num_accepted + 1, num_drafted)

    def rate(self, prior: float) -> float:
        """Return the probability that a guess is right, if those before it are."""
        return (self.hits + _PRIOR_TRIALS * prior) / (self.trials + _PRIOR_TRIALS)


class StepCost:
    """What one more token costs in a step: the slope of seconds over tokens, fitted to recent steps."""

    def __init__(self) -> None:
        self.token_seconds = 0.0
        self._weight = self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note a step's forward pass."""
        # A running fit (Welford's update) with exponentially falling weights.
        self._weight = _KEEP * self._weight + 1.0
        off_tokens, off_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += off_tokens / self._weight
        self._seconds += off_seconds / self._weight
        self._variance = _KEEP * self._variance + off_tokens * (num_tokens - self._tokens)
        self._covariance = _KEEP * self._covariance + off_tokens * (seconds - self._seconds)
        # Steps of one size say nothing about another.
        if self._variance > 1.0:
            highest = self._seconds / self._tokens
            self.token_seconds = min(max(self._covariance / self._variance, 0.0), highest)


class Speculator:
    """Decides how many tokens to guess for which sequence, has them guessed, and learns from the outcome.

    Args:
        proposer: guesses.
        num_tokens: most guesses for one sequence in one step.
        clock: for the cost of guesses; one that stands still makes them free.
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
        """Running mean of the time to guess one token."""
        self._tokens_per_second = 0.0
        self._num_steps = 0

    def propose(self, wanted: list[Wanted]) -> None:
        """Guess at most the wanted numbers of tokens and leave them in the sequences."""
        self._num_steps += 1
        lengths = [min(each.num_tokens, self._length(each.sequence)) for each in wanted]
        if self._num_steps % _EXPLORE_EVERY == 0:
            lengths = [int(length == 0) for length in lengths]
        wanted = [
            Wanted(each.sequence, length) for each, length in zip(wanted, lengths, strict=True) if length
        ]
        if not wanted:
            return
        start = self._clock()
        drafts = self._proposer.propose(wanted)
        self._note_draft(sum(map(len, drafts)), self._clock() - start)
        for each, draft in zip(wanted, drafts, strict=True):
            each.sequence.draft_token_ids = draft

    def _note_draft(self, num_drafted: int, seconds: float) -> None:
        if num_drafted and self._tokens_per_second:
            # Beyond this no guess pays, so how far beyond does not matter: a hiccup is soon forgotten.
            longest = 2.0 / self._tokens_per_second
            self._draft_seconds = _mean(self._draft_seconds, min(seconds / num_drafted, longest))

    def _length(self, sequence: Sequence) -> int:
        """Return how many guesses are each worth their time."""
        least = (self._cost.token_seconds + self._draft_seconds) * self._tokens_per_second
        own = self._acceptance.get(sequence, Acceptance())
        rate = own.rate(self._all.rate(1.0))
        if least <= 0.0 or rate >= 1.0:
            return self._num_tokens
        if least >= 1.0:
            return 0
        return min(self._num_tokens, int(math.log(least) / math.log(rate)))

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a sequence's guesses were right."""
        self._acceptance.setdefault(sequence, Acceptance()).note(num_drafted, num_accepted)
        self._all.note(num_drafted, num_accepted)
        drafted, accepted = self.counts
        self.counts = SpeculationCounts(drafted + num_drafted, accepted + num_accepted)

    def stepped(self, num_tokens: int, num_drawn: int, forward_seconds: float, seconds: float) -> None:
        """Note a step in which every sequence decoded: tokens computed and drawn, and its times."""
        self._cost.note(num_tokens, forward_seconds)
        if seconds > 0.0:
            self._tokens_per_second = _mean(self._tokens_per_second, num_drawn / seconds)


def _mean(before: float, latest: float) -> float:
    return latest if before == 0.0 else 0.8 * before + 0.2 * latest
