"""The rules of one sequence: counts that grow with it, and the rule to blame when no token is left."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.errors import NoTokenLeftError
from quire.engine.structured_output.logits_rules import LogitsRules, TokenCounts
from quire.sampling.params import SamplingParams

VOCAB_SIZE, EOS = 8, 0
token_lists = st.lists(st.integers(0, 200), max_size=150)


def as_dict(counts: TokenCounts) -> dict[int, float]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


@given(token_lists, token_lists, st.lists(st.integers(1, 40), max_size=6), st.booleans())
def test_counts_are_those_of_the_output(
    prompt: list[int], output: list[int], steps: list[int], with_prompt: bool
) -> None:
    counts = TokenCounts(len(prompt), with_prompt=with_prompt)
    num_seen = len(prompt)
    for step in [*steps, len(output)]:
        counts.update((prompt + output)[:num_seen])
        num_seen += step
    counts.update(prompt + output)
    of_prompt = dict.fromkeys(prompt, 0) if with_prompt else {}
    assert as_dict(counts) == of_prompt | Counter(output)


def test_a_copy_counts_on_its_own() -> None:
    counts = TokenCounts(1, with_prompt=True)
    counts.update([5, 6])
    copy = counts.copy()
    copy.update([5, 6, 6, 7])
    assert as_dict(counts) == {5: 0, 6: 1}
    assert as_dict(copy) == {5: 0, 6: 2, 7: 1}


def permitted(token_ids: list[int], num_prompt_tokens: int = 1, **params: Any) -> list[int] | None:
    rules = LogitsRules(SamplingParams(**params), num_prompt_tokens)
    mask = rules.permitted(token_ids, VOCAB_SIZE, frozenset({EOS}))
    return None if mask is None else np.flatnonzero(mask).tolist()


def test_without_rules_there_is_no_mask() -> None:
    assert permitted([5], presence_penalty=1.0) is None
    assert permitted([5, 6], min_tokens=1) is None


@pytest.mark.parametrize(
    ("token_ids", "params", "expected"),
    [
        ([5], {"allowed_token_ids": frozenset({3, 4})}, [3, 4]),
        ([5], {"bad_words": ((3,), (5, 4), (6, 7))}, [0, 1, 2, 5, 6, 7]),
        ([6, 5], {"bad_words": ((6, 5, 4), (1, 5, 3))}, [0, 1, 2, 3, 5, 6, 7]),
        ([5, 5], {"min_tokens": 2, "stop_token_ids": frozenset({7})}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_each_rule_forbids_its_tokens(
    token_ids: list[int], params: dict[str, Any], expected: list[int]
) -> None:
    assert permitted(token_ids, **params) == expected


def test_the_rule_that_forbids_every_token_is_named() -> None:
    rules: dict[str, Any] = {"allowed_token_ids": frozenset({EOS, 3}), "bad_words": ((3,),)}
    assert permitted([5], **rules) == [EOS]
    with pytest.raises(NoTokenLeftError, match="min_tokens leaves no token that the other") as caught:
        permitted([5, 6, 7], min_tokens=3, **rules)
    assert (caught.value.field, "after 2 tokens" in caught.value.problem) == ("min_tokens", True)


def test_a_grammar_that_cannot_be_copied_fails_the_copy_only() -> None:
    grammar: Any = SimpleNamespace(copy=Mock(side_effect=OverflowError("scripted")))
    rules = LogitsRules(SamplingParams(), 1, grammar)
    copy = rules.copy()
    assert isinstance(copy.error, OverflowError)
    assert rules.error is None
