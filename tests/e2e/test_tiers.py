"""Pools so small that every block cycles through host memory and disk, and answers that go back to P."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.config import DiskFolder
from tests.testing.stacks import StartStack, connect, make_prompt, metric, wait_until_idle

BLOCK_BYTES = {"llama": 3 * 2 * 2 * 16 * 32 * 4, "glm4_moe_lite": 3 * 16 * (128 + 16) * 4}
"""One model with keys and values, and one with latents."""
LENGTH, NUM_NEW, NUM_FULL = 330, 64, 20


@pytest.mark.parametrize("model", BLOCK_BYTES)
async def test_the_same_tokens_from_every_tier_and_after_a_restart(
    start_stack: StartStack, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "known")  # the disk's blocks are of this cluster
    settings = {
        "num_blocks": 26,
        "max_num_seqs": 4,
        "host_cache_bytes": 40 * BLOCK_BYTES[model],
        "disk_cache": DiskFolder(str(tmp_path), 400 * (BLOCK_BYTES[model] + 32)),
    }
    prompts = [make_prompt(LENGTH, seed=60 + index) for index in range(4)]
    with start_stack(model, **settings) as stack:
        async with connect(stack) as (client, workers):
            for number, prompt in enumerate([prompts[0], *prompts, *prompts]):
                answer = await client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=NUM_NEW)
                assert list(answer.token_ids) == expected(model, prompt)
                is_first = number in (0, 2, 3, 4)
                assert answer.usage.cached_prompt_tokens == (0 if is_first else NUM_FULL * 16)
                await wait_until_idle(workers)
            hits = {
                tier: metric(stack, "prefill-0", "quire_cache_tier_hits_total", tier=tier)
                for tier in ("pool", "host", "disk")
            }
            assert hits["pool"] >= NUM_FULL
            assert hits["disk"] >= NUM_FULL
            assert hits["pool"] + hits["host"] + hits["disk"] == 5 * NUM_FULL
            by_source = {
                source: metric(stack, "prefill-0", "quire_prefix_cache_hits_total", source=source)
                for source in ("own", "tier", "peer")
            }
            num_tier = int(hits["host"] + hits["disk"])
            assert by_source == {"own": (5 * NUM_FULL - num_tier) * 16, "tier": num_tier * 16, "peer": 0}
            assert metric(stack, "prefill-0", "quire_cache_tier_disk_errors_total") == 0
    with start_stack(model, **settings) as stack:
        async with connect(stack) as (client, workers):
            cached = 0
            for prompt in prompts:
                answer = await client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=NUM_NEW)
                assert list(answer.token_ids) == expected(model, prompt)
                cached += answer.usage.cached_prompt_tokens
                await wait_until_idle(workers)
            assert cached >= 2 * NUM_FULL * 16
