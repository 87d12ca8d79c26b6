"""Embeddings by real processes: those of torch, with the same bits from every worker and after a failure."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.client import AsyncClient, InvalidRequest
from quire.protos import worker_pb2
from quire.services.local.stack import RunningStack
from tests.testing.embedding_models import expected_embedding, make_embedding_model
from tests.testing.stacks import StartStack, connect, make_prompt, wait_until_idle

LENGTHS = (1, 16, 40, 150, 400)
PROMPTS = [make_prompt(length) for length in LENGTHS]
DIMENSIONS = 16
# Two ranks can divide these sizes.
SIZES = {"intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embeddings") / "model"
    return make_embedding_model(
        tiny_model("qwen3", **SIZES), folder, "lasttoken", matryoshka_dimensions=[DIMENSIONS]
    )


@pytest.fixture(scope="module")
def pair(start_stack: StartStack, model: Path) -> Iterator[RunningStack]:
    """Run two prefill workers and a decode worker of the model."""
    with start_stack("qwen3", model=str(model), num_prefill=2, http_port=0) as running:
        yield running


def expected(folder: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    vectors = [expected_embedding(folder, each, "lasttoken", **options) for each in prompts]
    return [pytest.approx(each, abs=2e-5) for each in vectors]


async def test_prefill_workers_embed(pair: RunningStack, model: Path) -> None:
    async with connect(pair) as (client, workers):
        first = await client.embed(PROMPTS)
        assert list(map(list, first.vectors)) == expected(model, PROMPTS)
        assert first.usage.prompt_tokens == sum(LENGTHS)
        again = await asyncio.gather(*(client.embed([each]) for each in PROMPTS))
        assert tuple(each.vectors[0] for each in again) == first.vectors
        assert sum(each.usage.cached_prompt_tokens for each in again) > 0
        few = await client.embed(PROMPTS, dimensions=DIMENSIONS)
        assert list(map(list, few.vectors)) == expected(model, PROMPTS, dimensions=DIMENSIONS)
        loads = await wait_until_idle(workers)
        assert loads["decode-0"].cached_blocks == 0
        url = f"http://{pair.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as http:
            found = await http.embeddings.create(model="", input=PROMPTS, encoding_format="float")
        assert tuple(tuple(each.embedding) for each in found.data) == first.vectors
        # An embedding model still generates.
        assert (await client.generate(PROMPTS[2], max_tokens=3, ignore_eos=True)).token_ids


async def test_ranks_and_decode_workers_give_the_same_bits(
    pair: RunningStack, start_stack: StartStack, model: Path
) -> None:
    ranks = {"num_prefill": 0, "tensor_parallel_size": 2, "threads": 1}
    with start_stack("qwen3", model=str(model), **ranks) as divided:
        async with AsyncClient(pair.address) as client, AsyncClient(divided.address) as other:
            assert (await client.embed(PROMPTS)).vectors == (await other.embed(PROMPTS)).vectors


async def test_cancelled_requests_hold_no_blocks(pair: RunningStack) -> None:
    async with connect(pair) as (client, workers):
        for seed in range(10):
            prompts = [make_prompt(400, seed=20 * seed + at) for at in range(20)]
            with suppress(TimeoutError):
                async with asyncio.timeout(0.005):
                    await client.embed(prompts)
        await wait_until_idle(workers)
        assert len((await client.embed(PROMPTS)).vectors) == len(PROMPTS)


async def test_a_causal_model_makes_no_embeddings(stack: RunningStack) -> None:
    async with AsyncClient(stack.address) as client:
        with pytest.raises(InvalidRequest, match=r"no modules\.json of sentence-transformers"):
            await client.embed(["hello"])


async def test_a_worker_killed_in_the_middle_is_replaced(pair: RunningStack, model: Path) -> None:
    """The last test of the module: it leaves the stack without ``prefill-0``."""
    prompts = [make_prompt(300, seed=1000 + seed) for seed in range(40)]
    async with connect(pair) as (client, workers):
        await workers["prefill-1"].ClearCache(worker_pb2.ClearCacheRequest())
        victim = pair.workers["prefill-0"].process
        assert victim.pid is not None
        # While it is stopped, none of its texts can end before it is killed.
        os.kill(victim.pid, signal.SIGSTOP)
        embedding = asyncio.create_task(client.embed(prompts))
        await _has_cached_blocks(workers["prefill-1"])
        victim.kill()
        found = await embedding
        assert list(map(list, found.vectors)) == expected(model, prompts)


async def _has_cached_blocks(worker: Any) -> None:
    async with asyncio.timeout(30):
        while not (await worker.GetLoad(worker_pb2.GetLoadRequest())).cached_blocks:
            await asyncio.sleep(0.01)
