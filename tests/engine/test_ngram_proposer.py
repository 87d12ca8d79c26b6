"""Draft tokens by prompt lookup: the continuation of the longest and latest repetition."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.sequences.sequence import Sequence
from quire.engine.speculation.ngram_proposer import NgramProposer, continue_repetition
from quire.engine.speculation.speculator import DraftRequest
from quire.sampling.params import SamplingParams


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_ngram_proposes_what_followed_the_longest_latest_repetition(tokens: list[int], k: int) -> None:
    def suffix_length(end: int) -> int:
        """Return how many tokens before ``end`` equal the last ones, up to 8."""
        length = 0
        while length < min(8, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    ends = [end for end in range(1, len(tokens)) if suffix_length(end) >= 2]
    got = continue_repetition(np.array(tokens, dtype=np.int32), k)
    if not ends:
        assert got == []
        return
    best = max(ends, key=lambda end: (suffix_length(end), end))
    text = list(tokens)
    for index in range(k):
        text.append(text[best + index])
    assert got == text[len(tokens) :]


def test_a_sequence_that_grows_is_looked_up_as_a_whole() -> None:
    """The buffer of tokens is extended step by step, past its first size."""
    proposer = NgramProposer()
    tokens = list(range(300))
    sequence, other = (Sequence(name, tokens[:200], 200, SamplingParams(), b"") for name in "ab")
    assert proposer.propose([DraftRequest(sequence, 3), DraftRequest(other, 3)]) == [[], []]
    sequence.token_ids += [*tokens[200:], 7, 8]
    assert proposer.propose([DraftRequest(other, 3), DraftRequest(sequence, 3)]) == [[], [9, 10, 11]]
    sequence.token_ids += [9, 40, 41]
    assert proposer.propose([DraftRequest(sequence, 2)]) == [[42, 43]]
