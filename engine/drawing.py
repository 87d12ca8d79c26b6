"""Draws a step's tokens: one for each sequence that was computed to its end, and more after right guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import NamedTuple

import torch

from quire.engine.sampler import sample
from quire.engine.scheduler import ScheduledSequence
from quire.engine.sequence import GeneratedToken, Sequence, SequenceStatus


class Drawing(NamedTuple):
    """A sequence that a step draws tokens for: the row of logits of the first, and the tokens so far."""

    sequence: Sequence
    row: int
    tokens: list[GeneratedToken]

    @property
    def num_accepted_tokens(self) -> int:
        """How many of the sequence's guesses were right."""
        drafts = self.sequence.draft_token_ids
        pairs = zip(drafts, self.tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))

    @property
    def goes_on(self) -> bool:
        """Whether the last token was guessed, so that there are logits for the next."""
        is_open = not self.sequence.status.is_finished
        return is_open and self.num_accepted_tokens == len(self.tokens)


def draw(
    drawings: list[Drawing],
    logits: torch.Tensor,
    eos_token_ids: frozenset[int],
    status_after_token: Callable[[Sequence], SequenceStatus],
) -> None:
    """Draw the next token of each sequence; after a right guess one more."""
    while drawings:
        rows = [each.row + len(each.tokens) for each in drawings]
        chosen = logits
        if rows != list(range(len(logits))):
            chosen = logits[torch.tensor(rows, device=logits.device)]
        sampled = sample(chosen, [each.sequence for each in drawings], eos_token_ids)
        for each, token_id, logprobs in zip(drawings, *sampled, strict=True):
            each.tokens.append(GeneratedToken(token_id, logprobs))
            each.sequence.token_ids.append(token_id)
            each.sequence.status = status_after_token(each.sequence)
        drawings = [each for each in drawings if each.goes_on]


def first_rows(scheduled: list[ScheduledSequence]) -> Iterator[int]:
    """Yield the row of the logits after each sequence's last token; those after its guesses follow it."""
    row = 0
    for each in scheduled:
        yield row
        row += each.num_drawn
