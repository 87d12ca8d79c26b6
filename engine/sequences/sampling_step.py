"""Samples a step's tokens: one for each fully computed sequence, and one after each right draft token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

import torch

from quire.engine.errors import RequestFailedError, RequestFailures
from quire.engine.sequences.sampler import are_finite, not_finite, rank_tokens, sample
from quire.engine.sequences.sequence import (
    GeneratedToken,
    ScheduledSequence,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    TokenLogprobs,
)
from quire.engine.sequences.stop_rules import StopRules

Sampled = tuple[list[SequenceUpdate], dict[str, RequestFailedError]]
"""Updates of the sequences that got tokens, and for each request with a failed sequence, the reason."""


class SampledRows(NamedTuple):
    """The sequences for which a step samples tokens, and the row of logits after each one's last token."""

    sequences: list[Sequence]
    rows: list[int]


def sample_tokens(to_sample: SampledRows, logits: torch.Tensor, rules: StopRules) -> Sampled:
    """Sample the next token of each sequence, and one more after each right draft token.

    The tokens are appended to the sequences, whose status is updated.

    Args:
        to_sample: the sequences.
        logits: ``[num_rows, vocab_size]``.
        rules: decide when a sequence ends.
    """
    updates, errors = _sample_round(to_sample, logits, rules)
    drafted = [each for each in updates if each.sequence.draft_token_ids]
    row_of = dict(zip(map(id, to_sample.sequences), to_sample.rows, strict=True)) if drafted else {}
    while drafted := [each for each in drafted if _goes_on(each)]:
        rows = [row_of[id(each.sequence)] + len(each.tokens) for each in drafted]
        more, failed = _sample_round(SampledRows([each.sequence for each in drafted], rows), logits, rules)
        tokens_of = {id(each.sequence): each.tokens for each in more}
        for each in drafted:
            if failed and id(each.sequence) not in tokens_of:
                _postpone_failure(each)
            else:
                each.tokens.extend(tokens_of[id(each.sequence)])
    return updates, errors


def _sample_round(to_sample: SampledRows, logits: torch.Tensor, rules: StopRules) -> Sampled:
    """Sample one token of each sequence; see ``sample_tokens``."""
    sequences, rows = to_sample
    if not sequences:
        return [], {}
    if rows != list(range(logits.shape[0])):
        logits = logits[torch.tensor(rows, device=logits.device)]
    token_ids, logprobs, errors = sample(logits, sequences, rules.eos_token_ids)
    new: Iterable[tuple[Sequence, int, TokenLogprobs | None]]
    new = zip(sequences, token_ids, logprobs, strict=True)
    if errors:
        for row in errors:
            sequences[row].status = SequenceStatus.FINISHED_FAILED
        new = [each for row, each in enumerate(new) if row not in errors]
    updates, status_after_token = [], rules.status_after_token
    for sequence, token_id, token_logprobs in new:
        sequence.token_ids.append(token_id)
        sequence.tally.num_generated_tokens += 1
        sequence.status = status = status_after_token(sequence)
        tokens = [GeneratedToken(token_id, token_logprobs)]
        updates.append(SequenceUpdate(sequence, sequence.num_computed_tokens, tokens, status))
    return updates, {sequences[row].attempt_id: error for row, error in errors.items()}


def num_accepted_tokens(update: SequenceUpdate) -> int:
    """Return how many draft tokens of a sequence were right."""
    pairs = zip(update.sequence.draft_token_ids, update.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))


def _goes_on(update: SequenceUpdate) -> bool:
    """Return whether the last token equals its draft token: then the step has logits for the next token."""
    return not update.sequence.status.is_finished and num_accepted_tokens(update) == len(update.tokens)


def _postpone_failure(update: SequenceUpdate) -> None:
    """Let the next step fail instead, since the tokens of this one may complete a stop string."""
    sequence = update.sequence
    sequence.status = SequenceStatus.DECODING
    # The last token counts as a wrong draft, so that the next step computes it.
    sequence.draft_token_ids[len(update.tokens) - 1] = -1


def score_prompts(
    scheduled: list[ScheduledSequence], logits: torch.Tensor, failures: RequestFailures
) -> None:
    """Record logprobs of prompt tokens from this step's logits, for the requests that ask for them.

    Args:
        scheduled: the sequences of the step, before their computed tokens are counted.
        logits: ``[num_scored, vocab_size]``: the rows of ``Sequence.positions_to_score``.
        failures: gets the requests whose logits are not finite.
    """
    for sequence, positions, rows in _rows_of_prompts(scheduled, logits, Sequence.positions_to_score):
        following = sequence.token_ids[positions.start + 1 : positions.stop + 1]
        num_top = sequence.params.num_prompt_logprobs or 0
        with failures.catch(sequence.attempt_id):
            if not are_finite(rows).all():
                raise not_finite()
            sequence.prompt_logprobs += rank_tokens(rows.float(), following, num_top)


def pool_prompts(scheduled: list[ScheduledSequence], hidden: torch.Tensor, failures: RequestFailures) -> None:
    """Add this step's hidden states to the embeddings that they belong to.

    Args:
        scheduled: the sequences of the step, before their computed tokens are counted.
        hidden: ``[num_hidden, hidden_size]``: the states of ``Sequence.positions_to_pool``.
        failures: gets the requests whose states are not finite.
    """
    for sequence, _, rows in _rows_of_prompts(scheduled, hidden, Sequence.positions_to_pool):
        assert sequence.pooled is not None, "it has positions to pool"
        with failures.catch(sequence.attempt_id):
            if not torch.isfinite(rows).all():
                raise not_finite()
            sequence.pooled.add(rows)


def _rows_of_prompts(
    scheduled: list[ScheduledSequence],
    values: torch.Tensor,
    positions_of: Callable[[Sequence, int], range],
) -> Iterator[tuple[Sequence, range, torch.Tensor]]:
    """Yield each sequence that has some of the values' rows, the positions of these, and the rows."""
    start = 0
    for sequence, num_tokens in scheduled:
        if positions := positions_of(sequence, num_tokens):
            yield sequence, positions, values[start : start + len(positions)]
            start += len(positions)


def first_rows(scheduled: list[ScheduledSequence]) -> Iterator[int]:
    """Yield the logits' row after each sequence's last token; the rows of its draft tokens follow."""
    row = 0
    for each in scheduled:
        yield row
        row += 1 + len(each.sequence.draft_token_ids)
