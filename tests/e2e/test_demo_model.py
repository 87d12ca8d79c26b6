"""The demo model answers as well through two processes as through transformers."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.client import Message
from quire.models.notes import HELD_OUT_SEEDS, held_out, question, sample_notes, text
from quire.models.source import demo_model_path
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from tests.testing.stacks import answers_to, connect

NUM_EXAMPLES, NUM_FACTS, MAX_TOKENS = 40, 20, 16
NUM_CHATS, NUM_TURNS = 2, 8
BLOCK_SIZE = 16


class Reference:
    """The demo model through transformers, in its own dtype."""

    def __init__(self) -> None:
        folder = demo_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def answer(self, messages: Any) -> list[int]:
        """Return the greedy tokens of an answer, its end included."""
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = self._model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Decode without the special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def bfloat16_stack() -> Iterator[RunningStack]:
    with local_stack(LocalStackConfig(router=RouterConfig(port=0), log_level="error")) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


async def test_the_stack_answers_exactly_like_transformers(
    bfloat16_stack: RunningStack, reference: Reference
) -> None:
    examples = held_out(NUM_EXAMPLES, NUM_FACTS)
    async with connect(bfloat16_stack) as (client, _):
        answers = await answers_to(client, examples, MAX_TOKENS)
    expected = [reference.text(reference.answer(example.messages)) for example in examples]
    num_right = sum(a == e.expected for a, e in zip(answers, examples, strict=True))
    assert num_right == sum(a == e.expected for a, e in zip(expected, examples, strict=True))
    assert num_right >= 0.97 * NUM_EXAMPLES


async def test_chats_of_eight_turns_equal_transformers_token_for_token(
    bfloat16_stack: RunningStack, reference: Reference
) -> None:
    async with connect(bfloat16_stack) as (client, _):
        for index in range(NUM_CHATS):
            rng = Random(2 * HELD_OUT_SEEDS + index)
            notes = sample_notes(rng, NUM_FACTS)
            messages: list[Message] = []
            num_tokens = 0
            for turn in range(NUM_TURNS):
                notes_first = f"{text(notes)} " if turn == 0 else ""
                messages.append({"role": "user", "content": notes_first + question(rng.choice(notes))})
                answer = await client.chat(messages, temperature=0.0, max_tokens=MAX_TOKENS)
                expected = reference.answer(messages)
                assert list(answer.token_ids) == expected
                # All chats begin with the same few tokens.
                assert (answer.usage.cached_prompt_tokens >= BLOCK_SIZE) == (turn > 0)
                num_tokens += len(expected)
                messages.append({"role": "assistant", "content": answer.text})
            assert num_tokens >= 64
