"""One conversation over all APIs of a real stack: the same tokens, and counts that agree everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.request import urlopen

import anthropic
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.client import Client
from quire.services.local.stack import RunningStack
from tests.testing.stacks import openai_client

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
TOOLS: Any = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
MAX_TOKENS = 60
USER = "the code of the lantern is 417. the room of the anchor is 902. what is the room of the anchor?"
MESSAGES: Any = [{"role": "system", "content": "be brief " * 20}, {"role": "user", "content": USER}]


class Answer(NamedTuple):
    """What a client gets over any API."""

    text: str
    calls: list[tuple[str, Any]]
    num_prompt: int
    num_cached: int
    num_answer: int


def by_grpc(stack: RunningStack, *, calls: bool) -> Answer:
    tools: Any = {**TOOLS, "single_call": True} if calls else {}
    with Client(stack.address) as client:
        answer = client.chat(
            MESSAGES,
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            parse=True,
            template_arguments={"enable_thinking": False},
            **tools,
        )
    [choice], usage = answer.choices, answer.usage
    found = [(call.name, json.loads(call.arguments)) for call in choice.tool_calls]
    return Answer(
        choice.content, found, usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens
    )


def by_chat(stack: RunningStack, *, calls: bool) -> Answer:
    tools: Any = {**TOOLS, "parallel_tool_calls": False} if calls else {}
    with openai_client(stack) as client:
        create: Any = client.chat.completions.create
        answer = create(
            model="demo",
            messages=MESSAGES,
            temperature=0,
            max_tokens=MAX_TOKENS,
            reasoning_effort="none",
            **tools,
        )
    message, usage = answer.choices[0].message, answer.usage
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Answer(message.content or "", found, usage.prompt_tokens, cached, usage.completion_tokens)


def by_responses(stack: RunningStack, *, calls: bool) -> Answer:
    tools: Any = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"} if calls else {}
    with openai_client(stack) as client:
        answer = client.responses.create(
            model="demo",
            input=MESSAGES,
            temperature=0,
            max_output_tokens=MAX_TOKENS,
            reasoning={"effort": "none"},
            parallel_tool_calls=not calls,
            **tools,
        )
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    found = [
        (item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"
    ]
    cached = usage.input_tokens_details.cached_tokens
    return Answer(answer.output_text, found, usage.input_tokens, cached, usage.output_tokens)


def by_messages(stack: RunningStack, *, calls: bool) -> Answer:
    tool = {"name": "weather", "description": "of a city", "input_schema": SCHEMA, "strict": True}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    tools: Any = {"tools": [tool], "tool_choice": choice} if calls else {}
    with anthropic.Anthropic(
        base_url=f"http://{stack.http_address}", api_key="none", max_retries=0
    ) as client:
        answer = client.messages.create(
            model="demo",
            system=MESSAGES[0]["content"],
            messages=MESSAGES[1:],
            max_tokens=MAX_TOKENS,
            thinking={"type": "disabled"},
            extra_body={"temperature": 0.0},
            **tools,
        )
    text = "".join(block.text for block in answer.content if block.type == "text")
    found = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    cached = answer.usage.cache_read_input_tokens or 0
    return Answer(text, found, answer.usage.input_tokens + cached, cached, answer.usage.output_tokens)


def counted(stack: RunningStack) -> list[int]:
    """Return the router's counts of prompt, cached and answer tokens so far."""
    with urlopen(f"http://{stack.http_address}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    names = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
    return [int(samples[f"quire_{name}_total"]) for name in names]


DOORS: list[Callable[..., Answer]] = [by_grpc, by_chat, by_responses, by_messages]


@pytest.mark.parametrize("calls", [False, True], ids=["text", "call"])
def test_all_apis_give_the_same_tokens_and_counts(thinking_stack: RunningStack, calls: bool) -> None:
    stack = thinking_stack
    before = counted(stack)
    answers = [door(stack, calls=calls) for door in DOORS]
    first, *others = answers
    assert all(other[:3] == first[:3] for other in others)
    assert {answer.num_answer for answer in answers} == {first.num_answer}
    assert bool(first.calls) == calls != bool(first.text)
    # The first request computed the prompt, unless the test before it shares its beginning.
    assert all(first.num_cached <= other.num_cached < other.num_prompt for other in others)
    assert len({other.num_cached for other in others}) == 1
    sums = [sum(column) for column in zip(*(answer[2:] for answer in answers), strict=True)]
    assert [after - start for after, start in zip(counted(stack), before, strict=True)] == sums
