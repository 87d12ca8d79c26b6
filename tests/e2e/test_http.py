"""The HTTP API over a real stack of the demo model, with OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.models.notes import held_out
from quire.models.source import demo_model_path
from quire.protos import worker_pb2 as pb
from quire.services.local.stack import RunningStack
from tests.testing.stacks import connect, openai_client, wait_until_idle

NUM_FACTS = 20


@pytest.fixture
def client(demo_stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai_client(demo_stack) as client:
        yield client


async def test_http_and_grpc_answers_are_equal(demo_stack: RunningStack, client: openai.OpenAI) -> None:
    async with connect(demo_stack) as (grpc_client, workers):
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
def test_echoed_logprobs_are_those_of_transformers(client: openai.OpenAI, max_tokens: int) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
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


async def test_a_disconnect_frees_all_blocks(demo_stack: RunningStack) -> None:
    url = f"http://{demo_stack.http_address}/v1"
    options: Any = {"model": "demo", "prompt": [[5] * 40, [6] * 40], "max_tokens": 4000, "n": 2}
    async with (
        connect(demo_stack) as (_, workers),
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
