from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.tokenization.answers import formats
from quire.tokenization.answers.formats import (
    AnswerFormat,
    CallFormat,
    CallSyntax,
    Delimiters,
    find_answer_format,
)
from quire.tokenization.answers.parser import AnswerParser

THINK = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"content": "text", "close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"}
KNOWN: dict[str, tuple[dict[str, Any], CallFormat]] = {
    "qwen 3": (
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        formats.HERMES,
    ),
    "qwen 3.5": (
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        },
        formats.QWEN_CODER,
    ),
    "gemma 4": (
        {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "content": "json"},
        formats.GEMMA_4,
    ),
    "mistral": ({"open": "[TOOL_CALLS]", "content": "json", "transform_each": True}, formats.MISTRAL_LIST),
}


def find(calls: object, reasoning: object = THINK, name: str = "reasoning_content") -> AnswerFormat | None:
    template = {"version": 1, "fields": {name: reasoning, "tool_calls": calls, "content": CONTENT}}
    return find_answer_format({"response_template": template}, "[TOOL_CALLS] in the chat template")


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("family", KNOWN)
def test_the_template_of_a_known_family_has_its_format(family: str, name: str) -> None:
    calls, expected = KNOWN[family]
    found = find(calls, name=name)
    assert found is not None
    assert (found.calls, found.reasoning) == (expected, Delimiters("<think>\n", "\n</think>"))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (
            {"open": "<call>", "close": ["</call>", "<end>"], "content": "json"},
            CallFormat(CallSyntax.JSON_CALL, open="<call>", close="</call>", separator="\n"),
        ),
        (
            {"open": "CALLS", "content": "json", "transform_each": True},
            CallFormat(CallSyntax.JSON_CALL, section_open="CALLS[", separator=", ", section_close="]"),
        ),
        (
            {"open_pattern": r"<call>(?P<name>\w+)<\|args\|>", "close_pattern": r"<end>(?:\s*<all>)?"},
            CallFormat(CallSyntax.JSON_ARGUMENTS, open="<call>", name_end="<|args|>", close="<end>"),
        ),
        (
            {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "content_args": {"tag_pattern": r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</>"},
            },
            CallFormat(
                CallSyntax.PARAMETERS,
                open="<call ",
                name_end=">",
                parameter_open="<",
                key_end=">",
                value_end="</>",
                close="</call>",
            ),
        ),
        ({"open_pattern": "<a>|<b>", "close": "</call>"}, None),
        ({"open_pattern": r"<(?P<name>\w+)>", "content_args": {"tag_pattern": "<(?P<key>.*)>"}}, None),
        ({"open_pattern": r"(?P<name>\w+):"}, None),
    ],
)
def test_the_template_of_an_unknown_family_shows_its_delimiters(
    calls: dict[str, Any], expected: CallFormat | None
) -> None:
    found = find(calls, {"open": "<r>", "close_pattern": r"\s*</r>"})
    assert found is not None
    assert (found.calls, found.reasoning) == (expected, Delimiters("<r>", "</r>"))


def test_a_template_of_another_version_does_not_count() -> None:
    assert find_answer_format({"response_template": {"version": 2, "fields": {}}}, "</think>") is not None
    assert find_answer_format({"response_template": {"fields": {"content": CONTENT}}}, "</think>") is None


values = st.recursive(
    st.none() | st.integers() | st.text("<(?P:)[*+\\s>", max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["open", "close", "open_pattern", "content_args", "tag_pattern", "tool_calls"]),
            inner,
        )
    ),
)


@given(values)
def test_any_template_is_read_without_errors(value: object) -> None:
    find_answer_format({"response_template": {"fields": value}}, None)
    if found := find(value, value):
        parser = AnswerParser(found, prompt_tail="", schemas={"f": {}})
        parser.feed("<(?P:)[*+ s>" * 3)
        parser.finish()
    find_answer_format({"response_template": value}, None)
