from __future__ import annotations

import pytest

from quire.tokenization.answers import formats
from quire.tokenization.answers.formats import AnswerFormat, CallFormat, Delimiters, find_answer_format

THINK = Delimiters("<think>\n", "\n</think>")


@pytest.mark.parametrize(
    ("source", "calls", "reasoning"),
    [
        ("<tool_call> </think>", formats.HERMES, THINK),
        ("<tool_call> <function= <parameter= <think>", formats.QWEN_CODER, THINK),
        (
            "<seed:tool_call> <function= <parameter= </seed:think>",
            formats.SEED_OSS,
            Delimiters("<seed:think>", "</seed:think>"),
        ),
        ("<tool_call> <arg_key>", formats.GLM, None),
        ("[TOOL_CALLS] [THINK]", formats.MISTRAL_LIST, Delimiters("[THINK]", "[/THINK]")),
        ("[TOOL_CALLS] [ARGS]", formats.MISTRAL_NAMED, None),
        ("<|channel|> <|message|> <|call|>", formats.HARMONY, None),
        ("</think>", None, THINK),
    ],
)
def test_marks_in_the_template_show_the_format(
    source: str, calls: CallFormat | None, reasoning: Delimiters | None
) -> None:
    found = find_answer_format({}, source)
    assert found is not None
    assert (found.calls, found.reasoning) == (calls, reasoning)


def test_a_template_without_marks_has_no_format() -> None:
    assert find_answer_format({}, "{{ messages }}") is None
    assert find_answer_format({}, None) is None


def test_only_the_added_tokens_in_delimiters_are_kept() -> None:
    added = ["<tool_call>", "</think>", "<|im_end|>", " ", "\n\n"]
    assert find_answer_format({}, "<tool_call> </think>", added) == AnswerFormat(
        THINK, formats.HERMES, tokens=frozenset({"<tool_call>", "</think>"})
    )
