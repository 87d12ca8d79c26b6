"""What a request does to the model's logits before a token is drawn: it bans, biases and penalises tokens.

The order is vLLM's: a grammar, allowed tokens, bad words, minimum length, bias, then the repetition,
frequency and presence penalties. Every operation is element-wise or stays in its row, so a token never
depends on who else is in the batch, and rows without rules cost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire.engine.structured_output import GrammarMatcher

if TYPE_CHECKING:
    from quire.engine.sampling_params import SamplingParams
    from quire.engine.sequence import Sequence

_FORBIDDEN = float("-inf")


class TokenCounts:
    """Which tokens a sequence has, and how often its output has each.

    ::

        ids     [ 7 | 9 | 2 | ... ]     in the order of their first occurrence
        counts  [ 0 | 3 | 1 | ... ]     in the output; 0 for a token of the prompt alone
    """

    def __init__(self, num_prompt_tokens: int, *, with_prompt: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0 if with_prompt else num_prompt_tokens
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def update(self, token_ids: list[int]) -> None:
        """Count the tokens that were appended since the last call."""
        prompt_end = max(self._num_seen, self._num_prompt_tokens)
        self._add(token_ids[self._num_seen : prompt_end], 0.0)
        self._add(token_ids[prompt_end:], 1.0)
        self._num_seen = len(token_ids)

    def _add(self, token_ids: list[int], amount: float) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += amount

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The tokens, each once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """How often each is in the output."""
        return self._counts[: len(self._places)]

    def copy(self) -> TokenCounts:
        """Return counts that go their own way from here."""
        other = copy(self)
        other._places = self._places.copy()
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other


class LogitsRules:
    """The rules of one sequence, in the form that a step needs.

    Nothing but the counts and the grammar's state depends on the tokens, and they follow from ``token_ids``
    and the prompt's length: a sequence that is resumed elsewhere goes on as before.
    """

    def __init__(
        self, params: SamplingParams, num_prompt_tokens: int, grammar: GrammarMatcher | None = None
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.allowed = np.array(sorted(params.allowed_token_ids), dtype=np.int64)
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.counts: TokenCounts | None = None
        if params.is_penalized:
            with_prompt = params.repetition_penalty != 1.0
            self.counts = TokenCounts(num_prompt_tokens, with_prompt=with_prompt)
        self._bad_alone = [word[0] for word in params.bad_words if len(word) == 1]
        # By the last token before the banned one, so that a step looks at few of many bad words.
        self._bad_after: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *before, last in params.bad_words:
            if before:
                self._bad_after[before[-1]].append((before, last))

    def banned(self, sequence: Sequence, eos_token_ids: frozenset[int]) -> list[int]:
        """Return the tokens that would complete a bad word, or end the output too early."""
        token_ids = sequence.token_ids
        banned = self._bad_alone[:]
        for before, last in self._bad_after.get(token_ids[-1], ()):
            if token_ids[-len(before) :] == before:
                banned.append(last)
        if sequence.num_output_tokens < self.params.min_tokens:
            banned += self.params.stop_token_ids | eos_token_ids
        return banned

    def copy(self) -> LogitsRules:
        """Return the rules of a sequence that goes its own way from here."""
        other = copy(self)
        other.counts = self.counts and self.counts.copy()
        other.grammar = self.grammar and self.grammar.copy()
        return other


class _RuledRow(NamedTuple):
    row: int
    sequence: Sequence
    rules: LogitsRules


def process_logits(
    logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]
) -> torch.Tensor:
    """Apply every sequence's rules to its row.

    Bans that together leave a row without any token are not applied to it: some token must be drawn.

    Args:
        logits: ``[num_sequences, vocab_size]``, float32; not changed.
        sequences: the owner of each row.
        eos_token_ids: forbidden to a sequence that has not reached its ``min_tokens``.

    Returns:
        The new logits; ``logits`` itself if there are no rules.
    """
    ruled = [
        _RuledRow(row, sequence, sequence.logits_rules)
        for row, sequence in enumerate(sequences)
        if sequence.logits_rules is not None
    ]
    if not ruled:
        return logits
    result = logits.clone()
    for each in ruled:
        _ban(result[each.row], each, eos_token_ids)
    _add_biases(result, [each for each in ruled if len(each.rules.bias_ids)])
    _penalize(result, ruled)
    return result


def _ban(logits: torch.Tensor, ruled: _RuledRow, eos_token_ids: frozenset[int]) -> None:
    """Forbid tokens in one row; of those that its grammar allows, not all."""
    if ruled.rules.grammar is not None:
        allowed = torch.from_numpy(ruled.rules.grammar.allowed(ruled.sequence.token_ids))
        logits.masked_fill_(~allowed.to(logits.device), _FORBIDDEN)
    banned = ruled.rules.banned(ruled.sequence, eos_token_ids)
    if not banned and not len(ruled.rules.allowed):
        return
    before = logits.clone()
    if len(ruled.rules.allowed):
        kept = torch.from_numpy(ruled.rules.allowed).to(logits.device)
        logits.fill_(_FORBIDDEN)
        logits[kept] = before[kept]
    if banned:
        logits[torch.tensor(banned, device=logits.device)] = _FORBIDDEN
    logits.copy_(torch.where(logits.max() == _FORBIDDEN, before, logits))


def _add_biases(logits: torch.Tensor, ruled: list[_RuledRow]) -> None:
    if not ruled:
        return
    index = _entries(logits, ruled, [each.rules.bias_ids for each in ruled])
    bias = np.concatenate([each.rules.bias for each in ruled])
    logits[index] += torch.from_numpy(bias).to(logits.device)


def _penalize(logits: torch.Tensor, ruled: list[_RuledRow]) -> None:
    """Lower the logits of tokens that occurred: those of all rows at once."""
    penalized, counted = [], []
    for each in ruled:
        if each.rules.counts is not None:
            each.rules.counts.update(each.sequence.token_ids)
            penalized.append(each)
            counted.append(each.rules.counts)
    if not counted:
        return
    index = _entries(logits, penalized, [each.ids for each in counted])
    counts = torch.from_numpy(np.concatenate([each.counts for each in counted])).to(logits.device)
    params = [each.rules.params for each in penalized]
    sizes = [len(each.ids) for each in counted]

    def spread(values: Iterable[float]) -> torch.Tensor:
        """Repeat each row's value for each of its tokens."""
        return torch.from_numpy(np.repeat(np.fromiter(values, np.float32), sizes)).to(logits.device)

    repetition = spread(p.repetition_penalty for p in params)
    values = logits[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread(p.frequency_penalty for p in params) * counts
    values -= spread(p.presence_penalty for p in params) * (counts > 0)
    logits[index] = values


def _entries(
    logits: torch.Tensor, ruled: list[_RuledRow], ids: Items[np.ndarray[tuple[int], np.dtype[np.int64]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of the given tokens of each row."""
    rows = np.repeat([each.row for each in ruled], [len(each) for each in ids])
    return (
        torch.from_numpy(rows).to(logits.device),
        torch.from_numpy(np.concatenate(ids)).to(logits.device),
    )
