"""OpenAI's tools and choices among them, as quire.v1 describes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.router.http.openai.requests import CalledTool, ChatCompletionRequest
from quire.services.router.http.openai.tools import ToolUse, input_of, template_calls

FUNCTION = {"type": "function", "function": {"name": "f", "strict": True}}
CUSTOM = {"type": "custom", "custom": {"name": "c", "description": "runs"}}
REQUIRED = pb.TOOL_MODE_REQUIRED


def use(choice: object = None, tools: object = (FUNCTION, CUSTOM), **more: object) -> ToolUse:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": tools or None, **more}
    return ToolUse.of(ChatCompletionRequest.model_validate_json(json.dumps({**body, "tool_choice": choice})))


def named(kind: str, name: str) -> dict[str, object]:
    return {"type": kind, kind: {"name": name}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, pb.ToolChoice()),
        ("auto", pb.ToolChoice()),
        ("required", pb.ToolChoice(mode=REQUIRED)),
        (named("function", "f"), pb.ToolChoice(mode=REQUIRED, names=["f"], is_single=True)),
        (named("custom", "c"), pb.ToolChoice(mode=REQUIRED, names=["c"], is_single=True)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("custom", "c")]}},
            pb.ToolChoice(names=["c"]),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [named("function", "f")]},
            },
            pb.ToolChoice(mode=REQUIRED, names=["f"]),
        ),
    ],
)
def test_each_choice_has_its_rules(choice: object, expected: pb.ToolChoice) -> None:
    assert use(choice).choice == expected
    assert use(choice, parallel_tool_calls=True).choice == expected
    expected.is_single = True
    assert use(choice, parallel_tool_calls=False).choice == expected


def test_without_tools_there_is_no_choice_but_a_wrong_one() -> None:
    assert use("none") == use(None, tools=None) == use("auto", tools=None) == ToolUse()
    assert use("required", tools=None).choice == pb.ToolChoice(mode=REQUIRED)


def test_a_custom_tool_is_described_as_a_function_of_one_text() -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}
    limited = {"type": "custom", "custom": {"name": "c", "format": form}}
    function, custom, pattern = json.loads(use(tools=[FUNCTION, CUSTOM, limited]).to_json())
    assert pattern["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert function == FUNCTION
    assert custom["function"]["description"] == "runs"
    assert custom["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert use().custom_names == {"c"}


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"input": "a\\n"}', "a\n"), ('{"input": "a', '{"input": "a'), ("[]", "[]")]
)
def test_the_input_of_a_custom_tool(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


def test_earlier_calls_keep_their_ids_and_have_objects_as_arguments() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "custom", "custom": {"name": "c", "input": "x"}},
    ]
    first, second = template_calls([CalledTool.model_validate(each) for each in calls])
    assert (first["id"], first["function"]["arguments"]) == ("1", {"a": 1})
    assert (second["id"], second["function"]["arguments"]) == ("2", {"input": "x"})
    with pytest.raises(InvalidArgument, match="must have a function"):
        template_calls([CalledTool(id="3")])


@pytest.mark.parametrize(("written", "expected"), [('"\\ud83d!"', "?!"), ('"\\ud83d\\ude00"', "\U0001f600")])
def test_half_of_a_surrogate_pair_in_an_input_is_replaced(written: str, expected: str) -> None:
    assert input_of(f'{{"input": {written}}}') == expected


def test_an_input_that_is_nested_too_deep_is_returned_as_it_is() -> None:
    arguments = '{"input": ' + "[" * 5000 + "]" * 5000 + "}"
    assert input_of(arguments) == arguments
