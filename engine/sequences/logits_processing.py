"""Applies a request's rules to the logits before a token is sampled: bans, biases and penalties.

The order is vLLM's: a grammar, allowed tokens, bad words, minimum length, bias, then the repetition,
frequency and presence penalties. Every operation works on single elements or rows, so a token never depends
on other sequences in the batch. Rows without rules cost nothing.

If the rules together forbid every token, no rule is relaxed, and the row has no finite logit. A sampled
request then ends with an error. A beam search continues without that beam.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch

from quire.engine.sequences.sequence import Sequence
from quire.engine.structured_output.logits_rules import LogitsRules

_FORBIDDEN = float("-inf")


class _RuledRow(NamedTuple):
    row: int
    sequence: Sequence
    rules: LogitsRules


def process_logits(
    logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]
) -> torch.Tensor:
    """Apply every sequence's rules to its row.

    Args:
        logits: ``[num_sequences, vocab_size]``, float32; not changed.
        sequences: the sequence of each row.
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
        _forbid(result[each.row], each, eos_token_ids)
    _add_biases(result, [each for each in ruled if len(each.rules.bias_ids)])
    _penalize(result, ruled)
    return result


def _forbid(logits: torch.Tensor, ruled: _RuledRow, stops: frozenset[int]) -> None:
    """Forbid the tokens that a sequence's rules do not permit; all tokens after an error in the rules."""
    rules, mask = ruled.rules, None
    if rules.error is None:
        try:
            mask = rules.permitted(ruled.sequence.token_ids, len(logits), stops)
        except Exception as error:
            rules.error = error
    if rules.error is not None:
        logits.fill_(_FORBIDDEN)
    elif mask is not None:
        logits.masked_fill_(torch.from_numpy(~mask).to(logits.device), _FORBIDDEN)


def _add_biases(logits: torch.Tensor, ruled: list[_RuledRow]) -> None:
    if not ruled:
        return
    index = _entries(logits, ruled, [each.rules.bias_ids for each in ruled])
    bias = np.concatenate([each.rules.bias for each in ruled])
    logits[index] += torch.from_numpy(bias).to(logits.device)


def _penalize(logits: torch.Tensor, ruled: list[_RuledRow]) -> None:
    """Apply the penalties to the logits of tokens that occurred, for all rows at once."""
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
    """Return the (rows, columns) index of the given tokens of each row."""
    rows = np.repeat([each.row for each in ruled], [len(each) for each in ids])
    return (
        torch.from_numpy(rows).to(logits.device),
        torch.from_numpy(np.concatenate(ids)).to(logits.device),
    )
