"""A request's rules for its tokens: which tokens may follow, and how often each token has occurred."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from copy import copy

import numpy as np

from quire.engine.errors import NoTokenLeftError
from quire.engine.structured_output.grammar import GrammarMatcher, Mask
from quire.sampling.params import SamplingParams


class TokenCounts:
    """The distinct tokens of a sequence, and how often each occurs in its output.

    ::

        ids     [ 7 | 9 | 2 | ... ]     in the order of their first occurrence
        counts  [ 0 | 3 | 1 | ... ]     in the output; 0 for a token that is only in the prompt
    """

    def __init__(self, num_prompt_tokens: int, *, with_prompt: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0 if with_prompt else num_prompt_tokens
        self._indices: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def update(self, token_ids: list[int]) -> None:
        """Count the tokens that were appended since the last call."""
        prompt_end = max(self._num_seen, self._num_prompt_tokens)
        self._count_tokens(token_ids[self._num_seen : prompt_end], 0.0)
        self._count_tokens(token_ids[prompt_end:], 1.0)
        self._num_seen = len(token_ids)

    def _count_tokens(self, token_ids: list[int], amount: float) -> None:
        for token_id in token_ids:
            index = self._indices.setdefault(token_id, len(self._indices))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._counts[index] += amount

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Token ids, each once."""
        return self._ids[: len(self._indices)]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """How often each of ``ids`` occurs in the output."""
        return self._counts[: len(self._indices)]

    def copy(self) -> TokenCounts:
        """Return an independent copy of the counts."""
        other = copy(self)
        other._indices = self._indices.copy()
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other


class LogitsRules:
    """The rules of one sequence, prepared for the steps.

    Only the counts and the grammar's state depend on the tokens. Both follow from ``token_ids`` and the
    prompt's length, so a sequence that another worker resumes continues unchanged.
    """

    def __init__(
        self, params: SamplingParams, num_prompt_tokens: int, grammar: GrammarMatcher | None = None
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.error: Exception | None = None
        """Error after which no token may follow: the rules allow none, or the grammar has failed."""
        self.allowed = np.array(sorted(params.allowed_token_ids), dtype=np.int64)
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._num_prompt_tokens = num_prompt_tokens
        self.counts: TokenCounts | None = None
        if params.is_penalized:
            with_prompt = params.repetition_penalty != 1.0
            self.counts = TokenCounts(num_prompt_tokens, with_prompt=with_prompt)
        self._bad_alone = [word[0] for word in params.bad_words if len(word) == 1]
        # The key is the last token before the banned one, so a step has to check only few of many bad words.
        self._bad_after: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *before, last in params.bad_words:
            if before:
                self._bad_after[before[-1]].append((before, last))

    def permitted(self, token_ids: list[int], vocab_size: int, stops: frozenset[int]) -> Mask | None:
        """Return which tokens may follow, ``[vocab_size]``; None if all may.

        Args:
            token_ids: prompt and output.
            vocab_size: size of the model's logits.
            stops: tokens that end an answer, which are forbidden before ``min_tokens``.

        Raises:
            NoTokenLeftError: no token may follow.
        """
        mask = None
        for field, mask in self._masks(token_ids, vocab_size, stops):
            if not mask.any():
                raise NoTokenLeftError(field, len(token_ids) - self._num_prompt_tokens)
        return mask

    def _masks(
        self, token_ids: list[int], vocab_size: int, stops: frozenset[int]
    ) -> Iterator[tuple[str, Mask]]:
        """Yield the name of each rule and the mask of tokens that it and the rules before it allow."""
        mask = np.ones(vocab_size, dtype=np.bool_)
        if self.grammar is not None:
            mask = mask & self.grammar.allowed(token_ids)
            yield "format", mask
        if len(self.allowed):
            kept = np.zeros(vocab_size, dtype=np.bool_)
            kept[self.allowed] = True
            mask = mask & kept
            yield "allowed_token_ids", mask
        for field, banned in (
            ("bad_words", self._completing_bad_words(token_ids)),
            ("min_tokens", self._ending_early(token_ids, stops)),
        ):
            if banned:
                mask[banned] = False
                yield field, mask

    def _completing_bad_words(self, token_ids: list[int]) -> list[int]:
        banned = self._bad_alone[:]
        for before, last in self._bad_after.get(token_ids[-1], ()):
            if token_ids[-len(before) :] == before:
                banned.append(last)
        return banned

    def _ending_early(self, token_ids: list[int], stops: frozenset[int]) -> list[int]:
        is_early = len(token_ids) - self._num_prompt_tokens < self.params.min_tokens
        return list(self.params.stop_token_ids | stops) if is_early else []

    def copy(self) -> LogitsRules:
        """Return an independent copy of the rules, for a forked sequence."""
        other = copy(self)
        other.counts = self.counts and self.counts.copy()
        try:
            other.grammar = self.grammar and self.grammar.copy()
        except Exception as error:
            other.error = error
        return other
