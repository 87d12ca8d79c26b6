"""Constraints that leave no token, compared with trying every token."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.sampling.constraints import check_vocabulary, contradiction
from quire.sampling.parameter import ParameterError
from quire.sampling.params import SamplingParams

VOCAB_SIZE = 4
tokens = st.integers(0, VOCAB_SIZE - 1)
words = st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=6)


@given(
    allowed=st.frozensets(tokens),
    bad_words=words,
    stop_token_ids=st.frozensets(tokens),
    eos_token_ids=st.frozensets(tokens),
    min_tokens=st.integers(0, 1),
)
@example(  # both leave nothing: the first is named
    allowed=frozenset({1}),
    bad_words=[(1,)],
    stop_token_ids=frozenset(),
    eos_token_ids=frozenset({1}),
    min_tokens=1,
)
def test_a_contradiction_is_found_exactly_if_no_first_token_is_allowed(
    allowed: frozenset[int],
    bad_words: list[tuple[int, ...]],
    stop_token_ids: frozenset[int],
    eos_token_ids: frozenset[int],
    min_tokens: int,
) -> None:
    params = SamplingParams(
        allowed_token_ids=allowed,
        bad_words=tuple(bad_words),
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
    )
    left = {
        token_id
        for token_id in range(VOCAB_SIZE)
        if (token_id in allowed or not allowed) and (token_id,) not in bad_words
    }
    ends = (eos_token_ids | stop_token_ids) if min_tokens else frozenset()
    expected = "bad_words" if not left else "min_tokens" if not left - ends else None
    assert contradiction(params, eos_token_ids, VOCAB_SIZE) == expected


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias=((1, 0.0), (4, 0.0))), "sampling.logit_bias"),
        (SamplingParams(allowed_token_ids=frozenset({0, 4})), "sampling.allowed_token_ids"),
        (SamplingParams(bad_words=((1, 4), (2,))), "sampling.bad_word_token_ids"),
        (SamplingParams(stop_token_ids=frozenset({4})), "stopping.stop_token_ids"),
    ],
)
def test_the_first_token_beyond_the_vocabulary_is_refused_by_name(params: SamplingParams, field: str) -> None:
    check_vocabulary(params, VOCAB_SIZE + 1)
    with pytest.raises(ParameterError, match="must be below 4; got 4") as caught:
        check_vocabulary(params, VOCAB_SIZE)
    assert caught.value.field == field
