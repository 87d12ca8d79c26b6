"""Several answers to one prompt, through router, prefill and decode worker."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.client import InvalidRequest
from quire.protos import worker_pb2
from quire.services.local.stack import RunningStack
from tests.testing.stacks import StartStack, connect, make_prompt, wait_until_idle
from tests.testing.tiny_models import load_reference, search_beams

TinyModel = Callable[[str], Path]

BLOCK_SIZE = 16
COUNTS = (
    "quire_step_sequences_total",
    "quire_kv_push_seconds_count",
    'quire_kv_transfer_blocks_total{direction="sent"}',
)
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 32, "ignore_eos": True}


async def prefill_counts(stack: RunningStack) -> list[float]:
    """Return how many sequences the prefill worker has computed, and how often and how much it has pushed."""
    port = stack.ready["prefill-0"].metrics_port

    def read() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            lines: list[str] = page.read().decode().splitlines()
            return lines

    counts = dict(line.rsplit(" ", 1) for line in await asyncio.to_thread(read))
    return [float(counts[name]) for name in COUNTS]


@pytest.mark.parametrize("length", [1, 2, 17, 100])
async def test_samples_equal_single_requests(length: int, stack: RunningStack) -> None:
    prompt = make_prompt(length, seed=31)
    async with connect(stack) as (client, workers):
        before = await prefill_counts(stack)
        together = await client.generate(prompt, n=8, seed=70, **SAMPLED)
        after = await prefill_counts(stack)
        num_blocks = -(-(length - 1) // BLOCK_SIZE)
        is_prefilled = length > 1
        assert [b - a for a, b in zip(before, after, strict=True)] == [is_prefilled, is_prefilled, num_blocks]
        separate = [await client.generate(prompt, seed=70 + index, **SAMPLED) for index in range(8)]
        assert [choice.index for choice in together.choices] == list(range(8))
        assert [choice.token_ids for choice in together.choices] == [each.token_ids for each in separate]
        assert [choice.text for choice in together.choices] == [each.text for each in separate]
        assert together.usage.completion_tokens == 8 * SAMPLED["max_tokens"]
        assert together.usage.blocks_shipped == num_blocks
        await wait_until_idle(workers)


async def test_samples_stream_side_by_side(stack: RunningStack) -> None:
    prompt = make_prompt(50, seed=32)
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    ended: list[int] = []
    async with connect(stack) as (client, workers):
        whole = await client.generate(prompt, n=4, seed=2**64 - 2, **SAMPLED)
        async for delta in client.stream(prompt, n=4, seed=2**64 - 2, **SAMPLED):
            tokens[delta.index] += delta.token_ids
            if delta.finish_reason:
                ended.append(delta.index)
                assert (delta.usage is not None) == (len(ended) == 4)
        assert [tuple(tokens[choice.index]) for choice in whole.choices] == [
            c.token_ids for c in whole.choices
        ]
        assert sorted(ended) == [0, 1, 2, 3]
        await wait_until_idle(workers)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
async def test_beams_equal_transformers(
    architecture: str, start_stack: StartStack, tiny_model: TinyModel
) -> None:
    with start_stack(architecture, num_blocks=256) as stack:
        async with connect(stack) as (client, workers):
            cases: list[tuple[int, int, float, Any]] = [
                (1, 2, 1.0, False),
                (33, 4, 0.5, True),
                (64, 2, 2.0, "never"),
            ]
            for length, width, penalty, early in cases:
                prompt = make_prompt(length, seed=33)
                answer = await client.generate(
                    prompt, beam_width=width, length_penalty=penalty, early_stopping=early, max_tokens=16
                )
                options = {"length_penalty": penalty, "early_stopping": early, "max_new_tokens": 16}
                reference = load_reference(tiny_model(architecture))
                answers, scores = search_beams(reference, prompt, width, **options)
                assert [list(choice.token_ids) for choice in answer.choices] == answers
                assert [choice.score for choice in answer.choices] == pytest.approx(scores, abs=1e-3)
                assert answer.usage.blocks_shipped == -(-(length - 1) // BLOCK_SIZE)
            # What can never fit is refused at once.
            with pytest.raises(InvalidRequest, match=r"sampling\.beam\.width: .* ask for fewer sequences"):
                await client.generate([5, 6], beam_width=64, max_tokens=200)
            with pytest.raises(InvalidRequest, match=r"sampling\.n: .* ask for fewer sequences"):
                await client.generate([5, 6], n=64, max_tokens=200)
            with pytest.raises(InvalidRequest, match=r"sampling\.n: must be from 1 to 64; got 65"):
                await client.generate([5, 6], n=65)
            await wait_until_idle(workers)


async def test_samples_survive_their_decode_worker(start_stack: StartStack) -> None:
    # Long enough that the worker dies before the answers end.
    prompt, options = make_prompt(60, seed=34), {**SAMPLED, "max_tokens": 400}
    with start_stack("llama", num_decode=2) as stack:
        async with connect(stack) as (client, workers):
            separate = [await client.generate(prompt, seed=5 + index, **options) for index in range(4)]
            tokens: defaultdict[int, list[int]] = defaultdict(list)
            usage, has_killed = None, False
            async for delta in client.stream(prompt, n=4, seed=5, **options):
                tokens[delta.index] += delta.token_ids
                usage = delta.usage or usage
                if len(tokens) == 4 and not has_killed:
                    has_killed = True
                    for name in ("decode-0", "decode-1"):
                        load = await workers[name].GetLoad(worker_pb2.GetLoadRequest())
                        if load.used_blocks:
                            stack.workers[name].process.kill()
            assert [tuple(tokens[index]) for index in range(4)] == [each.token_ids for each in separate]
            assert usage is not None
            assert usage.retries == 1


async def test_leaving_early_holds_nothing(stack: RunningStack) -> None:
    async with connect(stack) as (client, workers):

        async def leave(index: int) -> None:
            several = {"beam_width": 3} if index % 3 == 0 else {"n": 4}
            options = {**SAMPLED, **several, "max_tokens": 200}
            stream = client.stream(make_prompt(20 * index + 1, seed=35), **options)
            try:
                async with asyncio.timeout(0.02 * index):
                    async for _ in stream:
                        pass
            except TimeoutError:
                pass
            finally:
                await stream.aclose()

        await asyncio.gather(*(leave(index) for index in range(12)))
        await wait_until_idle(workers)
