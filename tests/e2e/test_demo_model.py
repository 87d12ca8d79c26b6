"""The demo model answers as well through two processes as through transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.models.notes import Example, held_out
from quire.services.local_stack import LocalStackConfig, local_stack
from quire.services.worker.app import demo_model_path

NUM_EXAMPLES, NUM_FACTS, MAX_TOKENS = 200, 20, 16


async def test_the_stack_answers_exactly_like_transformers(e2e: Any) -> None:
    examples = held_out(NUM_EXAMPLES, NUM_FACTS)
    with local_stack(LocalStackConfig(port=0, log_level="error")) as stack:
        async with e2e.connected(stack) as (client, workers):
            limit = asyncio.Semaphore(16)

            async def ask(example: Example) -> str:
                async with limit:
                    answer = await client.chat(list(example.messages), temperature=0.0, max_tokens=MAX_TOKENS)
                    assert answer.usage.blocks_shipped > 0
                    return str(answer.text)

            answers = await asyncio.gather(*map(ask, examples))
            await e2e.quiet(workers)
    through_transformers = _answers_of_transformers(examples)
    num_right = sum(a == e.expected for a, e in zip(answers, examples, strict=True))
    num_expected = sum(a == e.expected for a, e in zip(through_transformers, examples, strict=True))
    assert num_right == num_expected
    assert num_right >= 0.97 * NUM_EXAMPLES


def _answers_of_transformers(examples: list[Example]) -> list[str]:
    folder = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    answers = []
    for example in examples:
        text = tokenizer.apply_chat_template(
            list(example.messages), add_generation_prompt=True, tokenize=False
        )
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
        )
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers
