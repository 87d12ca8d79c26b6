"""Speculative decoding: propose draft tokens and verify them in one step (Leviathan et al., 2023).

A step computes a sequence's last token and its draft tokens together. The token at each position is then
sampled from the model's logits as usual, with that position's own random number. While it equals the draft
token, the logits after the draft token are valid, and the next token is sampled from them. The tokens are
therefore the same as without speculation, for every kind of sampling. A wrong draft token costs only time. A
sequence whose draft tokens are mostly wrong therefore gets no more of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.sequence import Sequence
from quire.engine.sequences.stop_rules import StopRules

_KEEP = 0.95
"""Factor by which the weight of older verifications falls with each new one."""
_FIRST_TRIALS = 4.0
"""Number of right draft tokens that each sequence is assumed to have had before its first verification."""
_LEAST_RATE = 0.25
"""If the rate of right draft tokens falls below this, the sequence gets no more until its answer ends."""


class DraftRequest(NamedTuple):
    """A sequence whose tokens are computed except the last, and how many draft tokens to propose for it."""

    sequence: Sequence
    num_tokens: int


def draft_requests(groups: Iterable[SequenceGroup], stop_rules: StopRules) -> list[DraftRequest]:
    """Return a request for each decoding sequence, for the most draft tokens that it could use."""
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
        """Return at most ``num_tokens`` draft tokens for each sequence, perhaps none."""


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
        """Record a verification. Draft tokens after the first wrong one do not count as trials."""
        self.hits = _KEEP * self.hits + num_accepted
        self.trials = _KEEP * self.trials + min(num_accepted + 1, num_drafted)

    @property
    def rate(self) -> float:
        """Estimated probability that a draft token is right, if all earlier ones are; 1 without trials."""
        return (self.hits + _FIRST_TRIALS) / (self.trials + _FIRST_TRIALS)


class Speculator:
    """Proposes draft tokens for the sequences that accept them, and counts how many are right.

    Args:
        proposer: proposes the draft tokens.
        num_tokens: most draft tokens for one sequence in one step.
    """

    def __init__(self, proposer: Proposer, num_tokens: int) -> None:
        self.counts = SpeculationCounts(0, 0)
        self._proposer = proposer
        self._num_tokens = num_tokens
        self._acceptance: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()

    def propose(self, requests: list[DraftRequest]) -> None:
        """Propose draft tokens and store them in the sequences' ``draft_token_ids``.

        Args:
            requests: the sequences, and the most draft tokens for each.
        """
        requests = [
            DraftRequest(each.sequence, min(each.num_tokens, self._num_tokens))
            for each in requests
            if self._accepts_drafts(each.sequence)
        ]
        if not requests:
            return
        for each, draft in zip(requests, self._proposer.propose(requests), strict=True):
            each.sequence.draft_token_ids = draft

    def _accepts_drafts(self, sequence: Sequence) -> bool:
        acceptance = self._acceptance.get(sequence)
        return acceptance is None or acceptance.rate >= _LEAST_RATE

    def record_verification(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a sequence's draft tokens were right."""
        self._acceptance.setdefault(sequence, Acceptance()).record_verification(num_drafted, num_accepted)
        drafted, accepted = self.counts
        self.counts = SpeculationCounts(drafted + num_drafted, accepted + num_accepted)
