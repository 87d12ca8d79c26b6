"""Divided answers over a real stack of the demo model, with grammars that make it call tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from quire.client import Client, Content, Reasoning, ToolCall
from quire.services.local.stack import RunningStack
from tests.testing.stacks import openai_client
from tests.testing.thinking_model import END_ID

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("weather", "time")
]
NAMED = {"type": "function", "function": {"name": "weather"}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


class City(BaseModel, extra="forbid"):
    """An answer of a fixed form."""

    city: bool


@pytest.fixture
def client(thinking_stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai_client(thinking_stack) as client:
        yield client


def options(*, thinks: bool, **more: Any) -> dict[str, Any]:
    extra = {"chat_template_kwargs": {"thinks": True} if thinks else {"enable_thinking": False}}
    # Nothing but a bias makes this model end its reasoning; the grammars allow that token only there.
    bias = {"logit_bias": {str(END_ID): 100}} if thinks else {}
    given = {name: value for name, value in more.items() if value is not None}
    return {"model": "demo", "messages": MESSAGES, "seed": 1, "extra_body": extra, **bias, **given}


CHOICES = [None, "auto", "required", NAMED]
FORMATS = [None, {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}]


@pytest.mark.parametrize(
    ("choice", "form", "thinks"),
    list(product(CHOICES, FORMATS, [False, True])),
    ids=lambda value: str(value)[:9],
)
def test_every_combination_is_right_or_refused(
    client: openai.OpenAI, choice: Any, form: Any, thinks: bool
) -> None:
    tools = {"tools": TOOLS, "tool_choice": choice} if choice else {}
    asked = options(thinks=thinks, response_format=form, max_tokens=200, **tools)
    create: Any = client.chat.completions.create
    must_call = choice in ("required", NAMED)
    if must_call and form:
        with pytest.raises(openai.BadRequestError, match="where the answer has response_format") as refused:
            create(**asked)
        assert refused.value.param == "tool_choice"
        return
    whole = create(**asked)
    [answer], usage = whole.choices, whole.usage
    calls, content = answer.message.tool_calls or [], answer.message.content
    assert (usage.completion_tokens_details.reasoning_tokens > 0) is thinks
    if must_call:
        assert (content, answer.finish_reason) == (None, "tool_calls")
        assert len(calls) == 1 or choice == "required"
    elif form and not calls:
        assert City.model_validate_json(content)
    elif form:
        assert content is None
    for call in calls:
        assert call.function.name in (("weather",) if choice == NAMED else ("weather", "time"))
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.id for part in parts if part.id] == [call.id for call in calls]
    for index, call in enumerate(calls):
        sent = [part.function.arguments for part in parts if part.index == index]
        assert "".join(sent) == call.function.arguments
    assert chunks[-2].choices[0].finish_reason == answer.finish_reason
    counted = ("completion_tokens", "prompt_tokens", "completion_tokens_details")
    assert [getattr(chunks[-1].usage, name) for name in counted] == [getattr(usage, name) for name in counted]


def test_the_python_client_has_typed_pieces(thinking_stack: RunningStack) -> None:
    asked: Any = {
        "seed": 1,
        "max_tokens": 200,
        "parse": True,
        "tools": TOOLS,
        "tool_choice": "required",
        "allowed_tools": ["time"],
        "single_call": True,
        "template_arguments": {"thinks": True},
        "logit_bias": {END_ID: 100.0},
    }
    with Client(thinking_stack.address) as client:
        whole = client.chat(MESSAGES, **asked)
        [answer] = whole.choices
        [call] = answer.tool_calls
        assert (call.name, answer.finish_reason) == ("time", "tool_calls")
        assert sum(piece.num_tokens for piece in answer.pieces) == len(answer.token_ids)
        reasoned = [piece.num_tokens for piece in answer.pieces if isinstance(piece, Reasoning)]
        assert sum(reasoned) == whole.usage.reasoning_tokens > 0
        pieces = [piece for delta in client.stream(MESSAGES, **asked) for piece in delta.pieces]
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        assert "".join(piece.arguments for piece in calls) == call.arguments
        assert [(piece.id, piece.name) for piece in calls if piece.name] == [(call.id, "time")]
        assert not any(piece.text for piece in pieces if isinstance(piece, Content))
        said: Any = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
        said.append({"role": "tool", "content": "noon", "tool_call_id": call.id})
        assert client.detokenize(client.tokenize(said)).count(call.id) == 1
