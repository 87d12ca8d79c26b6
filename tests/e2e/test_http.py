"""The HTTP API over a real stack of the demo model, with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types.shared_params.response_format_json_schema import JSONSchema
from transformers import AutoModelForCausalLM

from quire.client import InvalidRequest
from quire.models.notes import held_out
from quire.models.source import demo_model_path
from quire.protos import worker_pb2 as pb
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from tests.testing.stacks import connect, wait_until_idle

# The demo's own form, and in addition tools, which its own template does not know.
TEMPLATE = """{{- bos_token -}}
{%- if tools -%}<|system|>{{ tools | tojson }} are called by <tool_call>...</tool_call><|end|>{%- endif -%}
{%- for message in messages -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}
{%- endfor -%}
<|assistant|>"""
NUM_FACTS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    shutil.copytree(demo_model_path(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[RunningStack]:
    config = LocalStackConfig(
        router=RouterConfig(port=0, http_port=0, served_model_name="demo"),
        worker=WorkerConfig(role="decode", model=str(model), served_model_name="demo", dtype="float32"),
        log_level="error",
    )
    with local_stack(config) as running:
        yield running


@pytest.fixture
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{stack.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_http_and_grpc_answers_are_equal(stack: RunningStack, client: openai.OpenAI) -> None:
    async with connect(stack) as (grpc_client, workers):
        for example in held_out(8, NUM_FACTS):
            messages: Any = example.messages
            options: Any = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24}
            whole = client.chat.completions.create(**options)
            chunks = list(client.chat.completions.create(**options, stream=True))
            answer = await grpc_client.chat(messages, temperature=0.0, max_tokens=24)
            assert whole.choices[0].message.content == answer.text == example.expected
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.text
            assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
            assert answer.usage.cached_prompt_tokens > 0
        await wait_until_idle(workers)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_are_those_of_transformers(
    client: openai.OpenAI, model: Path, max_tokens: int
) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [list(range(20, 40)), [7, 9, 11]]
    completion = client.completions.create(
        model="demo", prompt=prompts, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == max_tokens * len(prompts)
    for prompt, choice in zip(prompts, completion.choices, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [logits[at, token].item() for at, token in enumerate(prompt[1:])]
        best = logits.max(-1).values.tolist()
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(
            expected + best[-1:][:max_tokens], abs=2e-3
        )
        tops = [max(top.values()) for top in choice.logprobs.top_logprobs[1:]]
        assert tops == pytest.approx(best[: len(tops)], abs=2e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_tokens_are_where_the_text_has_them(client: openai.OpenAI, stream: bool) -> None:
    prompt: Any = [0, 4, 598, 1, 5]
    options: Any = {"model": "demo", "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 0}
    if stream:
        choices = [c.choices[0] for c in client.completions.create(**options, stream=True) if c.choices]
    else:
        choices = client.completions.create(**options).choices
    text = "".join(choice.text for choice in choices)
    offsets = [at for choice in choices for at in (choice.logprobs and choice.logprobs.text_offset) or []]
    tokens = [token for choice in choices for token in (choice.logprobs and choice.logprobs.tokens) or []]
    assert len(tokens) == len(offsets) == len(prompt) + 3
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        assert text[begin:end] in (token, "")


async def test_a_form_that_no_answer_has_is_refused(stack: RunningStack, client: openai.OpenAI) -> None:
    schema: JSONSchema = {"name": "endless", "schema": {"$ref": "#"}}
    with pytest.raises(openai.BadRequestError, match="no answer has this form") as caught:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "hello"}],
            response_format={"type": "json_schema", "json_schema": schema},
        )
    assert caught.value.param == "response_format"
    async with connect(stack) as (grpc_client, _):
        with pytest.raises(InvalidRequest, match="no answer has this form") as refused:
            await grpc_client.generate([2, 3], grammar="start: start")
        assert refused.value.field == "format.grammar"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_follows_its_parameters(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
    }
    tools: Any = [
        {"type": "function", "function": {"name": "weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "time", "parameters": parameters}},
    ]
    options: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 1,
    }
    if stream:
        with client.chat.completions.stream(**options) as events:
            answer: Any = events.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**options).choices[0]
    assert (answer.finish_reason, answer.message.content or None) == ("tool_calls", None)
    [call] = answer.message.tool_calls
    assert call.function.name in (("weather", "time") if choice == "required" else ("weather",))
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert call.id


async def test_a_disconnect_frees_all_blocks(stack: RunningStack) -> None:
    url = f"http://{stack.http_address}/v1"
    options: Any = {"model": "demo", "prompt": [[5] * 40, [6] * 40], "max_tokens": 4000, "n": 2}
    async with (
        connect(stack) as (_, workers),
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        stream = await client.completions.create(**options, stream=True, extra_body={"ignore_eos": True})
        await anext(aiter(stream))
        await stream.close()
        asking = asyncio.create_task(client.completions.create(**options, extra_body={"ignore_eos": True}))
        async with asyncio.timeout(20):
            while not any([(await w.GetLoad(pb.GetLoadRequest())).used_blocks for w in workers.values()]):
                await asyncio.sleep(0.01)
        asking.cancel()
        await wait_until_idle(workers)
