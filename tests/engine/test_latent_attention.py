"""Layers with latent attention keep latents, and give what transformers computes with expanded heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.engine import Engine
from quire.engine.errors import KvBudgetError
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import UnsupportedModelError, observe_attention
from quire.engine.model.layers import attention
from quire.engine.model.layers.latent_attention import HeadLinear, LatentExpansion
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.speculation.ngram_proposer import NgramProposer
from quire.engine.speculation.speculator import Speculator
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kernels.cpu.products.amx_product import FLOAT32
from tests.testing.tiny_engine import CPU, make_engine, make_prompt, make_request, run, run_in_order

pytestmark = pytest.mark.slow

LATENT = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]
Load = Callable[[str], LoadedModel]
Expected = Callable[[str, list[int]], list[int]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64}


@pytest.mark.parametrize("architecture", LATENT)
def test_a_row_is_a_latent_and_a_rotated_key(architecture: str, load: Load) -> None:
    model = load(architecture)
    config = model.module.config
    shape = model.kv_shape(16)
    assert shape.latent_dim == config.kv_lora_rank
    assert shape.head_dim == config.kv_lora_rank + config.qk_rope_head_dim
    assert shape.block_bytes == 16 * 3 * shape.head_dim * 4
    # The weight that expands latents exists once: its two parts, and no third copy.
    assert not [name for name, _ in model.module.named_parameters() if "kv_b_proj" in name]
    expansion = model.module.model.layers[0].self_attn.kv_b_proj
    assert isinstance(expansion, LatentExpansion)


def test_each_head_multiplies_its_own_inputs() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((3, 70, 32), generator=generator)
    inputs = torch.randn((130, 3, 32), generator=generator)
    layer = HeadLinear(weight, "auto", FLOAT32)
    assert torch.equal(layer.weight, weight)
    torch.testing.assert_close(layer(inputs), torch.einsum("thi,hoi->tho", inputs, weight))
    assert torch.equal(layer(inputs[100:101]), layer(inputs)[100:101])


def test_a_preempted_sequence_gives_the_same_tokens(load: Load) -> None:
    requests: dict[str, dict[str, Any]] = {
        "samples": {"n": 4, "seed": 5},
        "greedy": {"temperature": 0.0},
        "more": {"n": 2, "seed": 9},
    }

    def make() -> list[Any]:
        return [
            make_request(name, make_prompt(50, index), **params)
            for index, (name, params) in enumerate(requests.items())
        ]

    expected = run(make_engine(load("deepseek_v3")), *make())
    for is_swapped in (True, False):
        engine = make_engine(load("deepseek_v3"), num_blocks=20, num_swap_blocks=40, prefers_swap=is_swapped)
        assert run(engine, *make()) == expected
        assert engine.preemption.counts[not is_swapped] == engine.preemption.num_preempted > 0


def test_draft_tokens_change_nothing(load: Load, expected: Expected) -> None:
    prompt = make_prompt(20) * 4
    engine = make_engine(load("deepseek_v3"), speculator=Speculator(NgramProposer(), 4))
    assert run_in_order(engine, make_request("r", prompt, **GREEDY)) == [expected("deepseek_v3", prompt)]


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_blocks_of_8_bits_give_close_logprobs(stored: str, load: Load) -> None:
    model = load("deepseek_v3")
    prompt = make_prompt(60)

    def logprobs(kv_cache_dtype: str) -> list[float]:
        memory = KvMemory(model.kv_shape(16, kv_cache_dtype), 64, CPU)
        engine = Engine(model, memory, SchedulerConfig(max_num_batched_tokens=23))
        sequence = make_request("r", prompt, max_tokens=1, num_prompt_logprobs=1)
        run_in_order(engine, sequence)
        return [each.logprob for each in sequence.prompt_logprobs]

    exact, rounded = (torch.tensor(logprobs(each)) for each in ("auto", stored))
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.15


@pytest.mark.parametrize("weight_dtype", ["int8", "int4", "w8a8"])
def test_quantized_weights_are_those_of_the_check(
    weight_dtype: str, tiny_model: Callable[[str], Path]
) -> None:
    """At load, logits over latents agree with eager attention over what the same weights expand."""
    model = load_model(str(tiny_model("deepseek_v3")), "float32", CPU, weight_dtype)
    assert model.kv_shape(16).latent_dim == 128


def test_keys_and_values_of_different_sizes_are_refused_without_latents(
    tiny_model: Callable[[str], Path],
) -> None:
    """As on a GPU, where layers expand their latents."""
    attention.register()
    module = AutoModelForCausalLM.from_pretrained(
        tiny_model("deepseek_v2"), attn_implementation=attention.IMPLEMENTATION
    )
    with pytest.raises(UnsupportedModelError, match="latents: this needs a kv_b_proj without bias"):
        observe_attention(module, module.config, 512)


def test_a_kv_budget_is_refused(load: Load) -> None:
    with pytest.raises(KvBudgetError, match="latent attention"):
        make_engine(load("minicpm3")).add_request(make_request("r", make_prompt(20), kv_budget_tokens=64))
