"""Several answers to one prompt, through router, prefill and decode worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.services.local.stack import RunningStack
from tests.testing.stacks import StartStack, connect, kill_busy_worker, make_prompt, metric
from tests.testing.tiny_models import load_reference, search_beams

TinyModel = Callable[[str], Path]

BLOCK_SIZE = 16
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 32, "ignore_eos": True}


def prefill_counts(stack: RunningStack) -> list[float]:
    """Return how many sequences the prefill worker has computed, and how often and how much it has pushed."""
    return [
        metric(stack, "prefill-0", "quire_step_sequences_total"),
        metric(stack, "prefill-0", "quire_kv_push_seconds_count"),
        metric(stack, "prefill-0", "quire_kv_transfer_blocks_total", direction="sent"),
    ]


@pytest.mark.parametrize("length", [1, 17, 100])
async def test_samples_equal_single_requests(length: int, stack: RunningStack) -> None:
    prompt = make_prompt(length, seed=31)
    async with connect(stack) as (client, _):
        before = prefill_counts(stack)
        together = await client.generate(prompt, n=8, seed=70, **SAMPLED)
        after = prefill_counts(stack)
        num_blocks = -(-(length - 1) // BLOCK_SIZE)
        is_prefilled = length > 1
        assert [b - a for a, b in zip(before, after, strict=True)] == [is_prefilled, is_prefilled, num_blocks]
        separate = [await client.generate(prompt, seed=70 + index, **SAMPLED) for index in range(8)]
        assert [choice.index for choice in together.choices] == list(range(8))
        assert [choice.token_ids for choice in together.choices] == [each.token_ids for each in separate]
        assert [choice.text for choice in together.choices] == [each.text for each in separate]
        assert together.usage.completion_tokens == 8 * SAMPLED["max_tokens"]
        assert together.usage.blocks_shipped == num_blocks


async def test_beams_equal_transformers(stack: RunningStack, tiny_model: TinyModel) -> None:
    cases: list[tuple[int, int, float, Any]] = [(1, 2, 1.0, False), (33, 4, 0.5, True), (64, 2, 2.0, "never")]
    async with connect(stack) as (client, _):
        for length, width, penalty, early in cases:
            prompt = make_prompt(length, seed=33)
            answer = await client.generate(
                prompt, beam_width=width, length_penalty=penalty, early_stopping=early, max_tokens=16
            )
            options = {"length_penalty": penalty, "early_stopping": early, "max_new_tokens": 16}
            answers, scores = search_beams(load_reference(tiny_model("llama")), prompt, width, **options)
            assert [list(choice.token_ids) for choice in answer.choices] == answers
            assert [choice.score for choice in answer.choices] == pytest.approx(scores, abs=1e-3)
            assert answer.usage.blocks_shipped == -(-(length - 1) // BLOCK_SIZE)


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
                    await kill_busy_worker(stack, workers)
            assert [tuple(tokens[index]) for index in range(4)] == [each.token_ids for each in separate]
            assert usage is not None
            assert usage.retries == 1
