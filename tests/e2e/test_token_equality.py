"""Tokens that crossed two processes equal those of transformers' generate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.client import InvalidRequest
from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import load_model
from quire.protos import worker_pb2
from quire.sampling.params import SamplingParams
from quire.services.local.stack import RunningStack
from tests.testing.decodes import decoding, disaggregated, make_sequence, prefill
from tests.testing.stacks import StartStack, connect, make_prompt
from tests.testing.tiny_engine import run

Expected = Callable[[str, list[int]], list[int]]

# A compiled one, one with sliding windows, and one that runs by its modules; tests of the engine have all.
ARCHITECTURES = ["llama", "mistral", "gpt_neox"]
PROMPT_LENGTHS = [1, 15, 16, 17, 96, 100]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 64}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_every_prompt_twice(architecture: str, start_stack: StartStack, check_greedy: Any) -> None:
    with start_stack(architecture, max_num_batched_tokens=64) as stack:
        async with connect(stack) as (client, _):
            for length in PROMPT_LENGTHS:
                prompt = make_prompt(length)
                first = await client.generate(prompt, **GREEDY)
                again = await client.generate(prompt, **GREEDY)
                check_greedy(architecture, prompt, list(first.token_ids))
                assert list(again.token_ids) == list(first.token_ids), f"{length} prompt tokens, cached"
                num_unseen = max(0, length + 1 - 24) // 16 if architecture == "mistral" else 0
                num_blocks = -(-length // 16) - num_unseen
                assert first.usage.blocks_shipped + first.usage.blocks_reused_on_decode == num_blocks
                assert again.usage.cached_prompt_tokens >= (length - 1) // 16 * 16


async def test_a_kv_budget(stack: RunningStack, tiny_model: Any, expected: Expected) -> None:
    """Through both workers it gives what one engine gives."""
    prompt = make_prompt(200, seed=41)
    loaded = load_model(str(tiny_model("llama")), "float32", torch.device("cpu"))
    memory = KvMemory(loaded.kv_shape(16), 64, torch.device("cpu"))
    engine = Engine(loaded, memory, SchedulerConfig())
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64, kv_budget_tokens=64)
    sequence = Sequence("r", list(prompt), len(prompt), params, b"")
    run(engine, sequence)
    async with connect(stack) as (client, _):
        answer = await client.generate(prompt, kv_budget_tokens=64, **GREEDY)
        assert answer.usage.blocks_shipped == 13
        assert list(answer.token_ids) == sequence.token_ids[200:] != expected("llama", prompt)


async def test_a_window_is_all_that_is_held_and_shipped(start_stack: StartStack, expected: Expected) -> None:
    """The pools have 10 blocks of 16 tokens; prompt and answer have 364 tokens; the window is 24."""
    with start_stack("mistral", max_num_seqs=8, max_num_batched_tokens=64, num_blocks=10) as stack:
        async with connect(stack) as (client, _):
            prompt = make_prompt(300)
            answer = await client.generate(prompt, **GREEDY)
            assert list(answer.token_ids) == expected("mistral", prompt)
            assert answer.usage.blocks_shipped == 19 - (300 + 1 - 24) // 16
            assert answer.usage.blocks_reused_on_decode == 0


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
async def test_prefix_hits(where: str, stack: RunningStack, expected: Expected) -> None:
    # No other test of this stack has these prompts.
    prompt = make_prompt(80, seed=50 + ["prefill", "decode", "both"].index(where))
    async with connect(stack) as (_, workers):
        if where in ("prefill", "both"):
            await prefill(workers["prefill-0"], make_sequence(prompt))
        if where in ("decode", "both"):
            warm = worker_pb2.DecodeRequest(sequence=make_sequence(prompt, max_tokens=1))
            async with decoding(workers["decode-0"], warm) as warming:
                await warming.outputs()
        tokens, prefilled, pushed = await disaggregated(
            workers["prefill-0"], workers["decode-0"], make_sequence(prompt)
        )
        assert [token.token_id for token in tokens] == expected("llama", prompt)
        assert pushed.num_held_blocks == (0 if where == "prefill" else 5)
        assert prefilled.num_cached_tokens == (0 if where == "decode" else 79)


async def test_structured_output_crosses_two_processes(stack: RunningStack) -> None:
    async with connect(stack) as (client, _):
        for seed in range(3):
            answer = await client.generate(make_prompt(30), regex="[a-f]{3}(-[0-9]{2}){1,3}", seed=seed)
            assert re.fullmatch("[a-f]{3}(-[0-9]{2}){1,3}", answer.text)
            assert answer.finish_reason == "stop"
        schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 5}
        answer = await client.generate(make_prompt(30), json_schema=schema)
        assert set(json.loads(answer.text)) <= {"a", "b"}
        answer = await client.generate(make_prompt(30), regex="(ab|cd){2,4}", n=3, prompt_logprobs=1)
        assert len(answer.choices) == 3
        assert all(re.fullmatch("(ab|cd){2,4}", choice.text) for choice in answer.choices)
        assert len(answer.prompt_logprobs) == 29
        with pytest.raises(InvalidRequest, match="unclosed character class"):
            await client.generate(make_prompt(30), regex="[ab")


async def test_rules_and_prompt_logprobs_cross_two_processes(
    stack: RunningStack, tiny_model: Callable[[str], Path]
) -> None:
    prompt = make_prompt(50, seed=9)
    rules: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.3}
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=24,
        ignore_eos=True,
        logit_bias=((60, 0.5),),
        bad_words=((17,), (44, 45)),
        num_prompt_logprobs=2,
        **rules,
    )
    sequence = Sequence("r", list(prompt), len(prompt), sampling, b"")
    model = load_model(str(tiny_model("llama")), "float32", torch.device("cpu"))
    memory = KvMemory(model.kv_shape(16), 16, torch.device("cpu"))
    engine = Engine(model, memory, SchedulerConfig())
    engine.add_request(sequence)
    expected: list[int] = []
    while not engine.is_idle:
        expected += [token.token_id for update in engine.step() for token in update.tokens]
    async with connect(stack) as (client, _):
        for _ in range(2):  # the second time all blocks are cached, but for the logits
            answer = await client.generate(
                prompt,
                temperature=0.0,
                max_tokens=24,
                ignore_eos=True,
                logit_bias={60: 0.5},
                bad_word_token_ids=[[17], [44, 45]],
                prompt_logprobs=2,
                **rules,
            )
            assert list(answer.token_ids) == expected
            assert len(answer.prompt_logprobs) == len(prompt) - 1
            for found, wanted in zip(answer.prompt_logprobs, sequence.prompt_logprobs, strict=True):
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-3)
                assert [top.token_id for top in found.top] == [token_id for token_id, _ in wanted.top]
        assert answer.usage.cached_prompt_tokens == 0
        assert answer.usage.blocks_reused_on_decode > 0
