"""A choice of texts as a grammar, which llguidance has to understand as it was meant."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from quire.sampling.output_format import choice_format

# Characters that a grammar or a JSON string writes in another way, and some that need several bytes.
texts = st.text(
    st.sampled_from('ab"\\/|\n\t\r\b\f\x00\x1f\x7f:[](){}$#é🙂\u2028') | st.characters(codec="utf-8")
)


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer whose tokens are single bytes."""
    return LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    """Return whether a text is a whole answer."""
    matcher = LLMatcher(byte_tokenizer(), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    encoded = list(text.encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


@given(choices=st.lists(texts.filter(bool), min_size=1, max_size=4), other=texts)
def test_an_answer_is_one_of_the_choices(choices: list[str], other: str) -> None:
    output_format = choice_format(choices)
    assert output_format.kind == "grammar"
    for choice in choices:
        assert accepts(output_format.text, choice), choice
    assert accepts(output_format.text, other) == (other in choices)


def test_a_choice_that_begins_another_is_a_whole_answer() -> None:
    grammar = choice_format(["no", "none"]).text
    assert [text for text in ("n", "no", "non", "none", "nones") if accepts(grammar, text)] == ["no", "none"]
