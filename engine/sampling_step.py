"""Samples a step's tokens: one for each fully computed sequence, one more after each right draft token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import NamedTuple

import torch

from quire.engine.request_errors import RequestFailedError
from quire.engine.sampler import sample
from quire.engine.scheduler import ScheduledSequence
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
        for row, each in enumerate(sequences):
            if row in sampled.errors:
                each.sequence.status = SequenceStatus.FINISHED_FAILED
                failed[each.sequence.request_id] = sampled.errors[row]
                continue
            token_id, logprobs = sampled.token_ids[row], sampled.logprobs[row]
            each.tokens.append(GeneratedToken(token_id, logprobs))
            each.sequence.token_ids.append(token_id)
            each.sequence.status = status_after_token(each.sequence)
        sequences = [each for each in sequences if each.goes_on]
    return failed


def first_rows(scheduled: list[ScheduledSequence]) -> Iterator[int]:
    """Yield the logits' row after each sequence's last token; the rows of its draft tokens follow."""
    row = 0
    for each in scheduled:
        yield row
        row += each.num_sampled_rows
