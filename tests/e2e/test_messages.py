"""Anthropic's SDK against a real stack: reasoning, counts and the list of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from quire.services.local.stack import RunningStack

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(thinking_stack: RunningStack) -> Iterator[anthropic.Anthropic]:
    url = f"http://{thinking_stack.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_reasoning_is_a_block_with_a_signature(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "messages": HELLO, "thinking": {"type": "adaptive"}}
    extra = {"temperature": 0.0}
    with client.messages.stream(**asked, max_tokens=20, extra_body=extra) as stream:
        answer: Any = stream.get_final_message()
    num_prompt = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(**asked).input_tokens == num_prompt
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
