"""The engine's greedy tokens equal those of transformers' generate, however the work is split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.model.decode_graphs import Capture, CudaCapture, DecodeGraphs
from quire.engine.model.step_tensors import StepTensors
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel, load_model
from tests.testing.tiny_engine import BLOCK_SIZE, RecordingRunner, make_engine, make_prompt, run_in_order
from tests.testing.tiny_engine import make_request as make_any_request

NUM_NEW = 64
Load = Callable[[str], LoadedModel]
CheckGreedy = Callable[..., None]
Expected = Callable[[str, list[int]], list[int]]
EXPERTS = ["gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"]
CONVOLUTIONS = ["lfm2", "lfm2_moe", "lfm3"]
DELTA_NETS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
KIMI_DELTA = ["kimi_linear", "bailing_hybrid"]
MAMBA = ["mamba", "falcon_mamba", "mamba2", "jamba", "zamba2", "bamba", "falcon_h1", "nemotron_h"]
STATES = [*MAMBA, "granitemoehybrid", *DELTA_NETS, *KIMI_DELTA, "minimax"]
LATENT = ["deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu"]
ARCHITECTURES = [
    *("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "opt"),
    *(*EXPERTS, *LATENT, *CONVOLUTIONS, *STATES, "llama4"),
]
PROMPT_LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 50, 100]


def make_request(name: str, prompt: list[int], **params: Any) -> Sequence:
    return make_any_request(name, prompt, **{"temperature": 0.0, "max_tokens": NUM_NEW, **params})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_prompt_length(architecture: str, load: Load, check_greedy: CheckGreedy) -> None:
    """The shortest prompt is computed alone, and the others in the same steps."""
    engine = make_engine(load(architecture), max_num_batched_tokens=256)
    prompts = [make_prompt(length) for length in PROMPT_LENGTHS]
    for batch in (prompts[:1], prompts[1:]):
        outputs = run_in_order(engine, *(make_request(str(len(prompt)), prompt) for prompt in batch))
        for prompt, tokens in zip(batch, outputs, strict=True):
            check_greedy(architecture, prompt, tokens)


@pytest.mark.parametrize("budget", [16, 100])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "llama4", *LATENT, *CONVOLUTIONS, *STATES])
def test_prefill_in_chunks(architecture: str, budget: int, load: Load, check_greedy: CheckGreedy) -> None:
    engine = make_engine(load(architecture), max_num_seqs=16, max_num_batched_tokens=budget)
    prompt = make_prompt(200)
    [tokens] = run_in_order(engine, make_request("r", prompt))
    check_greedy(architecture, prompt, tokens)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "glm4_moe_lite"])
def test_prefix_hits(architecture: str, load: Load, expected: Expected) -> None:
    engine = make_engine(load(architecture))
    prompt = make_prompt(96)
    first, again, longer = (
        make_request("first", prompt),
        make_request("again", prompt),
        make_request("longer", prompt + make_prompt(20)),
    )
    assert run_in_order(engine, first) == run_in_order(engine, again) == [expected(architecture, prompt)]
    assert run_in_order(engine, longer) == [expected(architecture, prompt + make_prompt(20))]
    # A full hit still computes its last token, whose logits give the first one that is sampled.
    assert [s.num_cached_tokens for s in (first, again, longer)] == [0, 95, 96]


@pytest.mark.parametrize(("num_equal", "num_cached"), [(37, 37), (44, 44), (47, 47), (48, 48), (35, 32)])
def test_the_beginning_of_a_cached_block_is_reused(
    num_equal: int, num_cached: int, load: Load, expected: Expected
) -> None:
    engine = make_engine(load("llama"))
    prompt = make_prompt(64)
    forked = prompt[:num_equal] + [(token + 1) % 300 + 2 for token in prompt[num_equal:]]
    first, second, again = (make_request(n, p) for n, p in (("1", prompt), ("2", forked), ("3", prompt)))
    outputs = [run_in_order(engine, sequence) for sequence in (first, second, again)]
    assert outputs == [[expected("llama", prompt)], [expected("llama", forked)], [expected("llama", prompt)]]
    assert [s.num_cached_tokens for s in (first, second, again)] == [0, num_cached, 63]


def test_a_block_is_not_evicted_before_it_is_copied(load: Load, expected: Expected) -> None:
    engine = make_engine(load("llama"), num_blocks=16, make_runner=RecordingRunner)
    assert isinstance(engine.runner, RecordingRunner)
    run_in_order(engine, make_request("first", make_prompt(30), max_tokens=2))
    run_in_order(engine, make_request("filler", make_prompt(220), max_tokens=4))
    assert engine.pool.counts == (2, 14, 0)  # the next eviction is the first one's block
    second = make_request("second", make_prompt(30)[:10] + make_prompt(140))
    assert run_in_order(engine, second) == [expected("llama", second.token_ids[:150])]
    assert second.num_cached_tokens == 10
    [moved] = engine.runner.schedules
    [(source, own)] = moved.copies
    assert source != own
    assert moved.pinned == [source]


def test_nothing_is_copied_when_the_pool_has_no_block_to_spare(load: Load, expected: Expected) -> None:
    engine = make_engine(load("llama"), num_blocks=12)
    run_in_order(engine, make_request("first", make_prompt(30), max_tokens=2))
    second = make_request("second", make_prompt(30)[:10] + make_prompt(170), max_tokens=12)
    assert run_in_order(engine, second) == [expected("llama", second.token_ids[:180])[:12]]
    assert second.num_cached_tokens == 0


def test_blocks_of_other_roots_are_not_copied(load: Load) -> None:
    engine = make_engine(load("llama"))
    run_in_order(engine, make_request("mine", make_prompt(40)))
    other = make_request("other", make_prompt(40))
    other.root_hash = b"another tenant's"
    run_in_order(engine, other)
    assert other.num_cached_tokens == 0


@pytest.mark.slow
def test_thirty_two_requests_at_once(load: Load, check_greedy: CheckGreedy) -> None:
    engine = make_engine(load("llama"), max_num_batched_tokens=128)
    prompts = [make_prompt(1 + 5 * index, seed=index % 3) for index in range(32)]
    outputs = run_in_order(engine, *(make_request(str(i), prompt) for i, prompt in enumerate(prompts)))
    for prompt, tokens in zip(prompts, outputs, strict=True):
        check_greedy("llama", prompt, tokens)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "has_graphs"),
    [
        pytest.param("cpu", True, id="cpu, fixed memory"),
        pytest.param("cuda", False, id="cuda", marks=ON_GPU),
        pytest.param("cuda", True, id="cuda, graphs", marks=ON_GPU),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral", "lfm2"])
def test_decode_steps_in_fixed_memory(
    architecture: str,
    device: str,
    has_graphs: bool,
    tiny_model: Callable[[str], Path],
    check_greedy: CheckGreedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a graph replays on a GPU, the CPU runs again, over the same padded tensors."""
    replays: list[StepTensors] = []
    run_graph = DecodeGraphs.run

    def recorded(graphs: DecodeGraphs, step: StepTensors) -> torch.Tensor:
        replays.append(step)
        return run_graph(graphs, step)

    monkeypatch.setattr(DecodeGraphs, "run", recorded)
    model = load_model(str(tiny_model(architecture)), "float32", torch.device(device))
    engine = make_engine(replace(model, recipe=None))
    if has_graphs:
        capture: Capture = CudaCapture() if device == "cuda" else lambda function: function
        engine.runner.capture_decode_steps(capture, 12, engine.max_model_len)
    prompts = [make_prompt(10 + 9 * index) for index in range(11)]
    for batch in (prompts[:1], prompts):  # the first rung, and one that is padded
        outputs = run_in_order(engine, *(make_request(str(i), prompt) for i, prompt in enumerate(batch)))
        for prompt, tokens in zip(batch, outputs, strict=True):
            check_greedy(architecture, prompt, tokens)
    assert bool(replays) == has_graphs


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(load: Load) -> None:
    engine = make_engine(load("llama"))
    params = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 1234}
    [single] = run_in_order(engine, make_request("single", make_prompt(30), **params))
    crowd = [make_request(f"c{i}", make_prompt(5 + i), temperature=1.0, seed=i) for i in range(31)]
    [among, *_] = run_in_order(engine, make_request("among", make_prompt(30), **params), *crowd)
    assert among == single
    assert len(set(single)) > 10
