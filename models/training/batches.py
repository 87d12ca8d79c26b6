"""Batches of conversations as token ids, with a weight for each token that counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from tokenizers import Tokenizer

from quire.models.notes import VALUES, Message
from quire.models.training.conversations import conversation, recital, small_talk
from quire.models.training.curriculum import Stage
from quire.models.training.train_tokenizer import BOS, CONTEXT, END, PAD, SPECIAL_TOKENS

VALUE_WEIGHT = 1.0
"""Weight of a value in an answer, which is what the model must learn."""
ANSWER_WEIGHT = 0.3
"""Weight of the other tokens of an answer, which are easy."""
CANNED_WEIGHT = 0.6
"""Weight of the tokens of an answer without a value; such answers are rare."""
TEXT_WEIGHT = 0.05
"""Weight of a token of the user's text that was chosen to be predicted too."""
TEXT_SHARE = 0.05
"""Share of the user's tokens that are chosen; the model's head is computed only at weighted positions."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations of one stage.

    Attributes:
        inputs: token ids, [conversations, tokens], padded at the end.
        positions: indices into the flattened inputs after which a token is predicted, [predictions].
        targets: the token ids that follow those positions, [predictions].
        weights: the weight of each prediction in the loss, [predictions].
    """

    inputs: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor

    @property
    def is_value(self) -> torch.Tensor:
        """Which predictions are values in answers, [predictions]."""
        return self.weights == VALUE_WEIGHT


class Batches:
    """Makes batches of fresh conversations."""

    def __init__(self, tokenizer: Tokenizer, *, plain: float, unknown: float) -> None:
        self._tokenizer = tokenizer
        self._plain = plain
        self._unknown = unknown
        self._values = {tokenizer.token_to_id(f"Ġ{value}") for value in VALUES}
        self._ids = {
            token: index for token, index in tokenizer.get_vocab().items() if token in SPECIAL_TOKENS
        }

    def draw(self, rng: Random, stage: Stage, num_tokens: int) -> Batch:
        """Make a batch of about ``num_tokens`` tokens."""
        recital_row = partial(self._recital, terse=rng.random() < 0.7)
        draw_row = recital_row if stage.recital else self._conversation
        rows = [draw_row(rng, stage) for _ in range(max(1, num_tokens // stage.tokens))]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [self._ids[PAD]] * (width - len(row)) for row, _ in rows])
        weights = torch.tensor([row + [0.0] * (width - len(row)) for _, row in rows])
        counted = weights[:, 1:].flatten()
        positions = counted.nonzero().squeeze(1)
        return Batch(
            inputs=ids[:, :-1].contiguous(),
            positions=positions,
            targets=ids[:, 1:].flatten()[positions],
            weights=counted[positions],
        )

    def _conversation(self, rng: Random, stage: Stage) -> tuple[list[int], list[float]]:
        """Make one conversation: its token ids and the weight of each."""
        turns = conversation(rng, stage.facts, stage.questions, plain=self._plain, unknown=self._unknown)
        if rng.random() < 0.1 * (1.0 - self._plain):
            talk = small_talk(rng)
            turns = [*turns, *talk] if turns[0].role == "system" or rng.random() < 0.5 else [*talk, *turns]
        ids = [self._ids[BOS]]
        weights = [0.0]
        for turn in turns:
            turn_ids, turn_weights = self._turn(rng, turn)
            ids += turn_ids
            weights += turn_weights
        return ids[:CONTEXT], weights[:CONTEXT]

    def _recital(self, rng: Random, stage: Stage, *, terse: bool) -> tuple[list[int], list[float]]:
        """Make one recital, with or without the token that begins a conversation."""
        ids = [self._ids[BOS]] * rng.randrange(2)
        weights = [0.0] * len(ids)
        space = ""
        for statement, repeated in recital(rng, stage.facts, stage.questions, terse=terse):
            body: list[int] = self._tokenizer.encode(space + statement).ids
            ids += body
            weights += [VALUE_WEIGHT if repeated and token in self._values else 0.0 for token in body]
            space = " "
        return ids, weights

    def _turn(self, rng: Random, turn: Message) -> tuple[list[int], list[float]]:
        """Tokenize one turn as the chat template writes it, and weigh its tokens."""
        head, end = self._ids[f"<|{turn.role}|>"], self._ids[END]
        body: list[int] = [*self._tokenizer.encode(turn.content).ids, end]
        if turn.role == "assistant":
            usual = CANNED_WEIGHT if self._values.isdisjoint(body) else ANSWER_WEIGHT
            weights = [VALUE_WEIGHT if token in self._values else usual for token in body]
        else:
            weights = [TEXT_WEIGHT if rng.random() < TEXT_SHARE else 0.0 for _ in body]
        return [head, *body], [0.0, *weights]
