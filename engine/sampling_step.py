"""Samples a step's tokens: one for each fully computed sequence, one more after each right draft token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import NamedTuple

import torch

from quire.engine.request_errors import RequestFailedError, RequestFailures
from quire.engine.sampler import are_finite, not_finite, rank_tokens, sample
from quire.engine.schedule import ScheduledSequence
from quire.engine.sequence import GeneratedToken, Sequence, SequenceStatus


class SampledSequence(NamedTuple):
    """A sequence that a step samples tokens for: the first token's row of logits, and the tokens so far."""

    sequence: Sequence
    row: int
    tokens: list[GeneratedToken]

    @property
    def num_accepted_tokens(self) -> int:
        """How many of the sequence's draft tokens were right."""
        drafts = self.sequence.draft_token_ids
        pairs = zip(drafts, self.tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))

    @property
    def goes_on(self) -> bool:
        """Whether the last token equals its draft token, so that the step has logits for the next one."""
        is_open = not self.sequence.status.is_finished
        return is_open and self.num_accepted_tokens == len(self.tokens)


def sample_tokens(
    sequences: list[SampledSequence],
    logits: torch.Tensor,
    eos_token_ids: frozenset[int],
    status_after_token: Callable[[Sequence], SequenceStatus],
) -> dict[str, RequestFailedError]:
    """Sample the next token of each sequence, and one more after each right draft token.

    The tokens are appended to ``sequences`` and to the sequences themselves, whose status is updated.

    Args:
        sequences: the sequences.
        logits: ``[num_rows, vocab_size]``.
        eos_token_ids: forbidden to a sequence that has not reached its ``min_tokens``.
        status_after_token: returns the status of a sequence after a new token.

    Returns:
        By request id, why a sequence of the request could not get a token.
    """
    failed: dict[str, RequestFailedError] = {}
    while sequences:
        rows = [each.row + len(each.tokens) for each in sequences]
        chosen = logits
        if rows != list(range(len(logits))):
            chosen = logits[torch.tensor(rows, device=logits.device)]
        sampled = sample(chosen, [each.sequence for each in sequences], eos_token_ids)
        errors = sampled.errors
        for row, each in enumerate(sequences):
            sequence, token_id = each.sequence, sampled.token_ids[row]
            if row in errors:
                sequence.status = SequenceStatus.FINISHED_FAILED
                failed[sequence.attempt_id] = errors[row]
                continue
            each.tokens.append(GeneratedToken(token_id, sampled.logprobs[row]))
            sequence.token_ids.append(token_id)
            sequence.status = status_after_token(sequence)
        sequences = [each for each in sequences if each.sequence.draft_token_ids and each.goes_on]
    return failed


def score_prompts(
    scheduled: list[ScheduledSequence], logits: torch.Tensor, failures: RequestFailures
) -> None:
    """Record the logprobs of prompt tokens that this step's logits give, where they are requested.

    Args:
        scheduled: the sequences of the step, before their computed tokens are counted.
        logits: ``[num_scored, vocab_size]``: the rows of ``Sequence.positions_to_score``.
        failures: gets the requests whose logits are not finite.
    """
    start = 0
    for sequence, num_tokens in scheduled:
        if sequence.params.num_prompt_logprobs is None:
            continue
        if positions := sequence.positions_to_score(num_tokens):
            rows = logits[start : start + len(positions)].float()
            start += len(positions)
            following = sequence.token_ids[positions.start + 1 : positions.stop + 1]
            num_top = sequence.params.num_prompt_logprobs or 0
            with failures.catch(sequence.attempt_id):
                if not are_finite(rows).all():
                    raise not_finite()
                sequence.prompt_logprobs += rank_tokens(rows, following, num_top)


def first_rows(scheduled: list[ScheduledSequence]) -> Iterator[int]:
    """Yield the logits' row after each sequence's last token; the rows of its draft tokens follow."""
    row = 0
    for each in scheduled:
        yield row
        row += 1 + len(each.sequence.draft_token_ids)
