"""Guesses by looking up: what followed the last tokens where they occurred before (Saxena, 2023).

It costs no model, and is often right where an answer repeats its prompt: quotes, code that is edited, tables,
and any text that has fallen into a loop.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from quire.engine.sequence import Sequence
from quire.engine.speculation import Wanted

_SHORTEST, _LONGEST = 2, 8
"""Tokens that must have occurred before, and how many make one place better than another."""
_WINDOW = 1 << 15
"""Last tokens that are searched, which bounds the time of a step: some 10 microseconds for a sequence."""

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


class TokenBuffer:
    """A sequence's tokens as an array that grows at its end."""

    def __init__(self) -> None:
        self._tokens: Tokens = np.empty(256, np.int32)
        self._num_tokens = 0

    def extend(self, token_ids: list[int]) -> Tokens:
        """Take over what was appended to ``token_ids`` since the last call; return all of them."""
        if len(token_ids) > len(self._tokens):
            grown = np.empty(2 * len(token_ids), np.int32)
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : len(token_ids)] = token_ids[self._num_tokens :]
        self._num_tokens = len(token_ids)
        return self._tokens[: self._num_tokens]


class NgramProposer:
    """Finds the longest repetition of a sequence's last tokens, the latest of several."""

    def __init__(self) -> None:
        self._buffers: WeakKeyDictionary[Sequence, TokenBuffer] = WeakKeyDictionary()

    def propose(self, wanted: list[Wanted]) -> list[list[int]]:
        """See ``Proposer``."""
        drafts = []
        for sequence, num_tokens in wanted:
            buffer = self._buffers.setdefault(sequence, TokenBuffer())
            drafts.append(continue_repetition(buffer.extend(sequence.token_ids)[-_WINDOW:], num_tokens))
        return drafts


def continue_repetition(tokens: Tokens, num_tokens: int) -> list[int]:
    """Return the tokens that followed the last ones where they occurred before; none if they did not.

    A repetition that reaches the end is a loop, which is continued round and round.
    """
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[:last] == tokens[last])
    for length in range(2, min(_LONGEST, last) + 1):
        before = places[places >= length - 1]
        longer = before[tokens[before - length + 1] == tokens[last - length + 1]]
        if not len(longer):
            if length <= _SHORTEST:
                return []
            break
        places = longer
    if last < _SHORTEST or not len(places):
        return []
    first = int(places[-1]) + 1
    period = len(tokens) - first
    following: list[int] = tokens[first + np.arange(num_tokens) % period].tolist()
    return following
