"""Rows of latents are pushed, pulled and kept in tiers as all blocks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.services.worker.config import DiskFolder
from tests.testing.decodes import make_sequence, prefill, pull_source
from tests.testing.stacks import StartStack, connect, make_prompt, metric, wait_until_idle

MODEL = "glm4_moe_lite"
BLOCK_BYTES = 3 * 16 * (128 + 16) * 4
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
            await wait_until_idle(workers)


async def test_the_same_tokens_from_every_tier(
    start_stack: StartStack, expected: Any, tmp_path: Path
) -> None:
    settings = {
        "num_blocks": 26,
        "max_num_seqs": 4,
        "host_cache_bytes": 40 * BLOCK_BYTES,
        "disk_cache": DiskFolder(str(tmp_path), 400 * (BLOCK_BYTES + 32)),
    }
    prompts = [make_prompt(LENGTH, seed=60 + index) for index in range(4)]
    with start_stack(MODEL, **settings) as stack:
        async with connect(stack) as (client, workers):
            for number, prompt in enumerate([prompts[0], *prompts, *prompts]):
                answer = await client.generate(prompt, **GREEDY)
                assert list(answer.token_ids) == expected(MODEL, prompt)
                is_first = number in (0, 2, 3, 4)
                assert answer.usage.cached_prompt_tokens == (0 if is_first else NUM_FULL * 16)
                await wait_until_idle(workers)
            hits = {
                tier: metric(stack, "prefill-0", "quire_cache_tier_hits_total", tier=tier)
                for tier in ("host", "disk")
            }
            assert hits["disk"] >= NUM_FULL
