"""The HTTP API over a real stack of the demo model, with OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.models.source import demo_model_path
from quire.services.local.stack import RunningStack
from tests.testing.stacks import openai_client


@pytest.fixture
def client(demo_stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai_client(demo_stack) as client:
        yield client


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
