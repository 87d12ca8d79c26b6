"""Models that mix layers with windows and layers that see all tokens, over several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.protos import worker_pb2
from quire.services.worker.config import DiskFolder
from tests.testing.decodes import decoding, make_sequence, prefill, pull_source
from tests.testing.stacks import StartStack, connect, make_prompt, metric, wait_until_idle

LENGTH, NUM_NEW = 400, 32
"""An answer is longer than a window."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_NEW}
NUM_BLOCKS, NUM_FULL = LENGTH // 16, (LENGTH - 1) // 16
LAYER_BYTES, CONVOLUTION_BYTES = 2 * 2 * 16 * 32 * 4, 2 * 1 * 16 * 24 * 4
STATE_LAYER_BYTES = 2 * 2 * 16 * 16 * 4
WINDOWS = {"gemma2": 24, "gemma3": 24, "lfm2": 3, "bamba": 2, "mamba2": 2, "qwen3_next": 2}
BLOCK_BYTES = {
    "gemma2": (LAYER_BYTES, 3 * LAYER_BYTES),
    "gemma3": (LAYER_BYTES, 7 * LAYER_BYTES),
    "lfm2": (2 * CONVOLUTION_BYTES, 6 * CONVOLUTION_BYTES),
    "bamba": (STATE_LAYER_BYTES, 7 * STATE_LAYER_BYTES),
    "mamba2": (STATE_LAYER_BYTES // 2, 17 * STATE_LAYER_BYTES // 2),
    "qwen3_next": (LAYER_BYTES, 10 * LAYER_BYTES),
}
"""Bytes of a bare block and of a whole one. LFM2 has two layers that see all tokens, the others one.

The two states of Bamba take the place of six layers, the three of Qwen3-Next that of nine, and the three of
Mamba 2, which has no attention, that of sixteen with one head.
"""


@pytest.mark.parametrize("architecture", list(WINDOWS))
async def test_prompts_are_pushed_pulled_and_cached(
    architecture: str, start_stack: StartStack, check_greedy: Any
) -> None:
    with start_stack(architecture, num_prefill=2, max_num_batched_tokens=64) as stack:
        async with connect(stack) as (client, workers):
            for length in (1, 16, 40, 96, 300):
                prompt = make_prompt(length)
                for _ in range(2):
                    answer = await client.generate(prompt, **GREEDY)
                    check_greedy(architecture, prompt, list(answer.token_ids), NUM_NEW)
                assert answer.usage.cached_prompt_tokens >= (length - 1) // 16 * 16
            # What no window shows is not sent.
            prompt = make_prompt(LENGTH, seed=1)
            answer = await client.generate(prompt, **GREEDY)
            check_greedy(architecture, prompt, list(answer.token_ids), NUM_NEW)
            assert answer.usage.blocks_shipped == NUM_BLOCKS
            num_bare = (LENGTH + 1 - WINDOWS[architecture]) // 16
            bare_bytes, whole_bytes = BLOCK_BYTES[architecture]
            num_bytes = num_bare * bare_bytes + (NUM_BLOCKS - num_bare) * whole_bytes
            assert answer.usage.bytes_shipped == num_bytes
            # Pulls, to a prefill worker and to a decode worker.
            prompt = make_prompt(LENGTH, seed=2)
            await prefill(workers["prefill-0"], make_sequence(prompt))
            source = await pull_source(workers["prefill-0"], NUM_FULL + 1)
            response = await prefill(workers["prefill-1"], make_sequence(prompt), pull_from=source)
            assert (response.pulled.num_blocks, response.pulled.failure) == (NUM_FULL, "")
            assert response.num_cached_tokens == NUM_FULL * 16
            request = worker_pb2.DecodeRequest(sequence=make_sequence(prompt, NUM_NEW), pull_from=source)
            async with decoding(workers["decode-0"], request) as decode:
                tokens = await decode.token_ids()
            check_greedy(architecture, prompt, tokens, NUM_NEW)
            assert response.tokens[0].token_id == tokens[0]
            assert decode.accepted.accepted.pulled.num_blocks == NUM_FULL


@pytest.mark.parametrize("architecture", ["gemma3", "lfm2", "qwen3_next"])
async def test_prompts_longer_than_the_pools(
    architecture: str, start_stack: StartStack, check_greedy: Any, tmp_path: Path
) -> None:
    """The pools have whole blocks for 352 or 224 tokens; prompt and answer have 432, and there are tiers."""
    settings = {
        "num_blocks": 22 if architecture == "lfm2" else 14,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "host_cache_bytes": 40 * 7 * LAYER_BYTES,
        "disk_cache": DiskFolder(str(tmp_path), 400 * 7 * LAYER_BYTES),
    }
    prompts = [make_prompt(length, seed=60 + length) for length in (LENGTH, 60, 90, 70, 300)]
    with start_stack(architecture, **settings) as stack:
        async with connect(stack) as (client, workers):
            for prompt in [*prompts, *prompts, *prompts[1:4]]:
                answer = await client.generate(prompt, **GREEDY)
                check_greedy(architecture, prompt, list(answer.token_ids), NUM_NEW)
                await wait_until_idle(workers)
            assert metric(stack, "prefill-0", "quire_cache_tier_hits_total", tier="host") > 0
