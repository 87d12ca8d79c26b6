"""Anthropic's SDK against a real stack: texts, reasoning, tool turns, streams and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from quire.services.local.stack import RunningStack

TOOLS: Any = [
    {
        "name": "weather",
        "description": "of a city",
        "strict": True,
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
NO_THINKING: Any = {"type": "disabled"}
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(thinking_stack: RunningStack) -> Iterator[anthropic.Anthropic]:
    url = f"http://{thinking_stack.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def options(**more: Any) -> dict[str, Any]:
    fixed = {"extra_body": {"temperature": 0.0}}
    return {"model": "demo", "max_tokens": 100, "messages": HELLO, "thinking": NO_THINKING, **fixed, **more}


def test_a_stream_adds_up_to_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**options(system="be brief"))
    with client.messages.stream(**options(system="be brief")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    [block] = whole.content
    assert block.type == "text"
    assert text == block.text
    assert [each.text for each in final.content if each.type == "text"] == [text]
    assert final.stop_reason == whole.stop_reason
    prompt = [each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in (whole, final)]
    assert (
        prompt[0]
        == prompt[1]
        == client.messages.count_tokens(
            model="demo", messages=HELLO, system="be brief", thinking=NO_THINKING
        ).input_tokens
    )
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_turn_with_a_tool(client: anthropic.Anthropic, is_stream: bool) -> None:
    asked = options(tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    if is_stream:
        with client.messages.stream(**asked) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    [call] = answer.content
    assert (call.type, call.name, call.input["city"] in ("Rome", "Oslo")) == ("tool_use", "weather", True)
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump(exclude_unset=True) for block in answer.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    following = client.messages.create(**options(messages=messages, tools=TOOLS))
    assert following.content


def test_reasoning_is_a_block_with_a_signature(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**options(max_tokens=20, thinking={"type": "adaptive"})) as stream:
        answer: Any = stream.get_final_message()
    [block] = answer.content
    assert (block.type, answer.stop_reason) == ("thinking", "max_tokens")
    assert block.thinking
    assert block.signature
    assert answer.usage.output_tokens_details.thinking_tokens == answer.usage.output_tokens == 20


def test_the_model_is_listed(client: anthropic.Anthropic) -> None:
    [model] = client.models.list()
    assert (model.id, model.max_input_tokens) == ("demo", 4095)
    assert client.models.retrieve("demo") == model
    # Claude Code asks for this before its first request.
    assert client.with_options(max_retries=0).get("/", cast_to=object)
