"""Proposes draft tokens by prompt lookup (Saxena, 2023).

It looks for an earlier occurrence of the sequence's last tokens, and proposes the tokens that followed it.
This needs no draft model. The draft tokens are often right where an answer repeats its prompt, as in quotes,
edited code and tables, and where a text repeats itself in a loop.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from quire.engine.sequences.sequence import Sequence
from quire.engine.speculation.speculator import DraftRequest

_SHORTEST, _LONGEST = 2, 8
"""Fewest last tokens that an occurrence must match, and most that are compared to rank occurrences."""
_WINDOW = 1 << 15
"""Number of last tokens that are searched, which bounds the time to about 10 microseconds per sequence."""

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


class TokenBuffer:
    """A sequence's tokens as an array that grows at its end."""

    def __init__(self) -> None:
        self._tokens: Tokens = np.empty(256, np.int32)
        self._num_tokens = 0

    def extend(self, token_ids: list[int]) -> Tokens:
        """Add the tokens that were appended to ``token_ids`` since the last call; return all tokens."""
        if len(token_ids) > len(self._tokens):
            grown = np.empty(2 * len(token_ids), np.int32)
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : len(token_ids)] = token_ids[self._num_tokens :]
        self._num_tokens = len(token_ids)
        return self._tokens[: self._num_tokens]


class NgramProposer:
    """Finds the longest earlier occurrence of a sequence's last tokens, or the latest of several."""

    def __init__(self) -> None:
        self._buffers: WeakKeyDictionary[Sequence, TokenBuffer] = WeakKeyDictionary()

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """Return draft tokens for each sequence; see ``Proposer.propose``."""
        drafts = []
        for sequence, num_tokens in requests:
            buffer = self._buffers.setdefault(sequence, TokenBuffer())
            drafts.append(continue_repetition(buffer.extend(sequence.token_ids)[-_WINDOW:], num_tokens))
        return drafts


def continue_repetition(tokens: Tokens, num_tokens: int) -> list[int]:
    """Return the ``num_tokens`` tokens after an earlier occurrence of the last tokens; [] if there is none.

    If fewer than ``num_tokens`` tokens follow the occurrence, they are repeated.
    """
    last = len(tokens) - 1
    positions = np.flatnonzero(tokens[:last] == tokens[last])
    for length in range(2, min(_LONGEST, last) + 1):
        before = positions[positions >= length - 1]
        longer = before[tokens[before - length + 1] == tokens[last - length + 1]]
        if not len(longer):
            if length <= _SHORTEST:
                return []
            break
        positions = longer
    if last < _SHORTEST or not len(positions):
        return []
    first = int(positions[-1]) + 1
    period = len(tokens) - first
    following: list[int] = tokens[first + np.arange(num_tokens) % period].tolist()
    return following
