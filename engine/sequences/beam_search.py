"""Beam search as transformers does it (version 5), one step at a time.

Each step extends every beam by every token, keeps the most probable extensions, and stores the answers that
ended. Details decide which answer wins: what counts as a candidate, when an answer's score is divided by its
length, and when the search ends. All of them are the same as in transformers.

``choose_extensions`` runs a step of a search, and ``answers`` gives its result.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from quire.engine.errors import NoTokenLeftError
from quire.engine.sequences.logits_processing import process_logits
from quire.engine.sequences.sampler import are_finite, log_sums, not_finite
from quire.engine.sequences.sequence import GeneratedToken, Sequence, SequenceStatus, SequenceUpdate
from quire.sampling.params import BeamParams

_IMPOSSIBLE = -1.0e9


class BeamExtension(NamedTuple):
    """A beam of the next step: the index of the beam that it extends, and the new token."""

    parent: int
    token_id: int


class Hypothesis(NamedTuple):
    """A finished answer.

    Attributes:
        score: logprob of the answer, divided by its length to the power of the length penalty.
        token_ids: the generated tokens.
        is_stopped: whether it ended with a stop token, rather than at its maximum length.
    """

    score: float
    token_ids: list[int]
    is_stopped: bool


class BeamSearch:
    """The state of one request's beam search: the scores of its beams, and its finished answers.

    Args:
        params: width, length penalty and early stopping.
        max_tokens: number of tokens at which an answer ends.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(self, params: BeamParams, max_tokens: int, stop_token_ids: frozenset[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._stops = stop_token_ids
        self._stop_tensor = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
        self._num_candidates = max(2, 1 + len(stop_token_ids)) * params.width
        self._scores = torch.zeros(1)
        self._can_improve = True
        self.hypotheses: list[Hypothesis] = []
        """Finished answers, the best one first. Their number is at most the width."""
        self.is_done = False

    def advance(self, logprobs: torch.Tensor, outputs: list[list[int]]) -> list[BeamExtension]:
        """Extend the beams by one token.

        Args:
            logprobs: ``[num_beams, vocab_size]``, with beams in the order of the last step's extensions, and
                minus infinity for forbidden tokens.
            outputs: the tokens that each beam has generated.

        Returns:
            The beams of the next step, the best one first. There are fewer than the width if fewer are
            allowed, and none if the search is over. If it is over and there are no hypotheses, no token was
            allowed.
        """
        totals = (logprobs.cpu() + self._scores[:, None]).flatten()
        vocab_size = logprobs.shape[-1]
        count = min(self._num_candidates, int((totals != float("-inf")).sum()))
        if not count:
            self.is_done = True
            return []
        scores, indices = totals.topk(count)
        length = len(outputs[0]) + 1
        is_end = torch.isin(indices % vocab_size, self._stop_tensor) | (length >= self._max_tokens)
        running = scores + is_end * _IMPOSSIBLE
        width = min(self._params.width, count)
        best, order = running.topk(width)
        # If too few others are allowed, some of these end an answer and are no beams.
        goes_on = ~is_end[order]
        best, order = best[goes_on], order[goes_on]
        candidates = _extensions(indices[:width], vocab_size)
        self._finish(scores[:width].tolist(), candidates, is_end[:width].tolist(), outputs, length)
        self._scores = best
        best_running = float(best[0]) if len(best) else -math.inf
        self._update_is_done(best_running, length, bool(is_end.all()))
        return [] if self.is_done else _extensions(indices[order], vocab_size)

    def _finish(
        self,
        scores: list[float],
        candidates: list[BeamExtension],
        ends: list[bool],
        outputs: list[list[int]],
        length: int,
    ) -> None:
        """Add those of the best candidates that end an answer to the hypotheses."""
        if not self._can_improve or (self._is_full and self._params.early_stopping is True):
            return
        for score, candidate, is_end in zip(scores, candidates, ends, strict=True):
            if is_end:
                tokens = [*outputs[candidate.parent], candidate.token_id]
                is_stopped = candidate.token_id in self._stops
                self.hypotheses.append(Hypothesis(self._params.score(score, length), tokens, is_stopped))
        self.hypotheses.sort(key=lambda each: each.score, reverse=True)
        del self.hypotheses[self._params.width :]

    @property
    def _is_full(self) -> bool:
        return len(self.hypotheses) == self._params.width

    def _update_is_done(self, best_running: float, length: int, have_all_ended: bool) -> None:
        """End the search if no beam can beat the worst finished answer, or if none is likely to beat it."""
        params = self._params
        if self._is_full:
            looks_far = params.early_stopping == "never" and params.length_penalty > 0.0
            final_length = self._max_tokens if looks_far else length
            best_possible = params.score(best_running, final_length)
            self._can_improve = self._can_improve and best_possible > self.hypotheses[-1].score
        is_enough = self._is_full and params.early_stopping is True
        self.is_done = not self._can_improve or is_enough or have_all_ended


def _extensions(indices: torch.Tensor, vocab_size: int) -> list[BeamExtension]:
    """Return the beams and tokens at indices of a flattened ``[num_beams, vocab_size]``."""
    return [BeamExtension(*divmod(index, vocab_size)) for index in indices.tolist()]


def choose_extensions(
    search: BeamSearch, beams: list[Sequence], logits: torch.Tensor, eos_token_ids: frozenset[int]
) -> list[BeamExtension]:
    """Return the extensions that a beam search chooses; a beam that no token may follow gets none.

    Args:
        search: the state of the beam search.
        beams: its beams, in the order of the last step's extensions.
        logits: ``[num_beams, vocab_size]``; any float type.
        eos_token_ids: forbidden to a beam that has not reached its ``min_tokens``.

    Raises:
        RequestFailedError: the logits are not finite, or no token was allowed from the start.
        Exception: the format of a beam has failed.
    """
    outputs = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
    logits = logits.float()
    if not are_finite(logits).all():
        raise not_finite()
    # As in transformers, the rules change logprobs, so the probabilities no longer sum to one.
    logprobs = process_logits((logits - log_sums(logits)).float(), beams, eos_token_ids)
    errors = [beam.logits_rules.error for beam in beams if beam.logits_rules is not None]
    for error in errors:
        # A beam ends if no token may follow it. If a beam's format fails, the whole request fails, since this
        # beam might have become the best one.
        if error is not None and not isinstance(error, NoTokenLeftError):
            raise error
    extensions = search.advance(logprobs, outputs)
    if search.is_done and not search.hypotheses:
        raise next((error for error in errors if error is not None), not_finite())
    return extensions


def answers(search: BeamSearch, prompt: Sequence) -> list[SequenceUpdate]:
    """Return one update for each answer of a beam search that has ended, the best first."""
    prompt_ids = prompt.token_ids[: prompt.num_prompt_tokens]
    updates = []
    for index, (score, token_ids, is_stopped) in enumerate(search.hypotheses):
        answer = replace(prompt, index=index, token_ids=prompt_ids + token_ids, block_table=[])
        answer.status = SequenceStatus.FINISHED_STOPPED if is_stopped else SequenceStatus.FINISHED_LENGTH
        tokens = [GeneratedToken(token_id, None) for token_id in token_ids]
        updates.append(SequenceUpdate(answer, answer.num_tokens, tokens, answer.status, score))
    return updates
