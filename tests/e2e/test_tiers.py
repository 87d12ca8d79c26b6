"""Pools so small that every block cycles through host memory and disk, and answers that go back to P."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceStub
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


@pytest.mark.parametrize("num_host_blocks", [0, 40])
async def test_an_ended_session_leaves_only_its_first_prompt(
    start_stack: StartStack, num_host_blocks: int
) -> None:
    settings = {"num_blocks": 64, "host_cache_bytes": num_host_blocks * BLOCK_BYTES["llama"]}
    with start_stack("llama", **settings) as stack:
        async with connect(stack) as (_, workers), grpc.aio.insecure_channel(stack.address) as channel:
            stub = GenerationServiceStub(channel)

            async def turn(prompt: list[int]) -> tuple[list[int], int]:
                generation = pb.Generation(token_ids=pb.TokenIds(ids=prompt), session="s")
                generation.stopping.max_tokens, generation.stopping.ignore_eos = NUM_NEW, True
                answer = await stub.Generate(pb.GenerateRequest(generation=generation), timeout=60)
                await wait_until_idle(workers)
                return [*prompt, *answer.choices[0].token_ids], answer.usage.cached_prompt_tokens

            async def end(session: str) -> int:
                return int((await stub.EndSession(pb.EndSessionRequest(session=session))).num_blocks)

            first, _ = await turn(make_prompt(LENGTH, seed=90))
            second, cached = await turn([*first, 5])
            assert cached >= NUM_FULL * 16
            assert await end("other") == 0
            assert await end("s") > 0
            assert (await turn([*second, 5]))[1] == NUM_FULL * 16
