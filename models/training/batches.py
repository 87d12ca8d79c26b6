"""Batches of conversations as token ids, with a weight for each token that counts in the loss."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from quire.models.notes import VALUES, Message
from quire.models.training.conversations import conversation, recital
from quire.models.training.tokenizer import BOS, CONTEXT, END, PAD, SPECIAL_TOKENS

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

Row = tuple[list[int], list[float]]
"""Token ids, and the weight of each."""


class Stage(NamedTuple):
    """The size of each conversation in a batch."""

    facts: int
    questions: int
    """Number of questions, or of statements in a recital."""
    is_recital: bool = False

    @property
    def tokens(self) -> int:
        """Approximate tokens of such a conversation: 8 for a note, 20 for a question with its answer."""
        return 4 * self.questions if self.is_recital else 8 * self.facts + 20 * self.questions + 8


class Batch(NamedTuple):
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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._values = {tokenizer.token_to_id(f"Ġ{value}") for value in VALUES}
        vocabulary = tokenizer.get_vocab()
        self._ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}

    def draw(self, rng: Random, stage: Stage, num_tokens: int) -> Batch:
        """Make a batch of about ``num_tokens`` tokens."""
        terse = rng.random() < 0.7
        rows = [
            self._recital(rng, stage, terse) if stage.is_recital else self._conversation(rng, stage)
            for _ in range(max(1, num_tokens // stage.tokens))
        ]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [self._ids[PAD]] * (width - len(row)) for row, _ in rows])
        weights = torch.tensor([row + [0.0] * (width - len(row)) for _, row in rows])
        counted = weights[:, 1:].flatten()
        positions = counted.nonzero().squeeze(1)
        targets = ids[:, 1:].flatten()[positions]
        return Batch(ids[:, :-1].contiguous(), positions, targets, counted[positions])

    def _conversation(self, rng: Random, stage: Stage) -> Row:
        ids, weights = [self._ids[BOS]], [0.0]
        for turn in conversation(rng, stage.facts, stage.questions):
            turn_ids, turn_weights = self._turn(rng, turn)
            ids += turn_ids
            weights += turn_weights
        return ids[:CONTEXT], weights[:CONTEXT]

    def _recital(self, rng: Random, stage: Stage, terse: bool) -> Row:
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

    def _turn(self, rng: Random, turn: Message) -> Row:
        """Tokenize one turn as the chat template writes it, and weigh its tokens."""
        head, end = self._ids[f"<|{turn.role}|>"], self._ids[END]
        body: list[int] = [*self._tokenizer.encode(turn.content).ids, end]
        if turn.role == "assistant":
            usual = CANNED_WEIGHT if self._values.isdisjoint(body) else ANSWER_WEIGHT
            weights = [VALUE_WEIGHT if token in self._values else usual for token in body]
        else:
            weights = [TEXT_WEIGHT if rng.random() < TEXT_SHARE else 0.0 for _ in body]
        return [head, *body], [0.0, *weights]
