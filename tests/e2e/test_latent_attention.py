"""Rows of latents are pushed and pulled as all blocks are; ``test_tiers`` keeps them in tiers."""

from __future__ import annotations

from typing import Any

from tests.testing.decodes import make_sequence, prefill, pull_source
from tests.testing.stacks import StartStack, connect, make_prompt

MODEL = "glm4_moe_lite"
LENGTH, NUM_NEW, NUM_FULL = 330, 64, 20
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_NEW}


async def test_a_prompt_moves_between_workers(start_stack: StartStack, expected: Any) -> None:
    with start_stack(MODEL, num_prefill=2, max_num_batched_tokens=64) as stack:
        async with connect(stack) as (client, workers):
            prompt = make_prompt(LENGTH, seed=1)
            await prefill(workers["prefill-0"], make_sequence(prompt))
            source = await pull_source(workers["prefill-0"], NUM_FULL + 1)
            response = await prefill(workers["prefill-1"], make_sequence(prompt), pull_from=source)
            assert response.tokens[0].token_id == expected(MODEL, prompt)[0]
            assert (response.pulled.num_blocks, response.pulled.failure) == (NUM_FULL, "")
            for prompt in (make_prompt(LENGTH, seed=2), make_prompt(17)):
                answer = await client.generate(prompt, **GREEDY)
                assert list(answer.token_ids) == expected(MODEL, prompt)
                assert answer.usage.blocks_shipped == -(-len(prompt) // 16)
