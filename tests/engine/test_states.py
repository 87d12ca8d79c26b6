"""Layers with a state through everything that moves, shares and restores blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.config import EngineConfig
from quire.engine.errors import KvBudgetError
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.states import StateShape, with_states
from quire.engine.pool_memory import allocate_pool
from quire.engine.weights.adapters import UnsupportedAdapterError, check_adaptable
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kvindex.kv_layout import KvShape
from quire.llm import LLM
from quire.settings.setting import SettingError
from tests.testing.random_schedules import check_random_schedule
from tests.testing.tiny_engine import (
    CPU,
    check_prefix_hit,
    generated,
    make_engine,
    make_prompt,
    make_request,
    run,
    run_in_order,
)
from tests.testing.tiny_models import best_tokens, load_reference, make_random_model

TinyModel = Callable[..., Path]
Load = Callable[[str], LoadedModel]
each_kind = pytest.mark.parametrize(
    "architecture", ["bamba", "mamba2", "jamba", "falcon_mamba", "qwen3_next", "kimi_linear", "minimax"]
)
"""A model with states of each kind, and models without attention."""


@pytest.fixture(scope="module")
def bamba(tiny_model: TinyModel) -> LoadedModel:
    return load_model(str(tiny_model("bamba")), "float32", CPU)


def test_states_take_the_place_of_layers_with_a_window(bamba: LoadedModel) -> None:
    """A layer has 8 heads of 16 rows, and 3 inputs of 192 channels; a row has 16 numbers."""
    assert bamba.heads.states == (2, 8 * 16 + 3 * 12, 16)
    shape = bamba.kv_shape(16)
    # 16 tokens of 2 heads of 16 keys and values are 64 rows, so the 328 rows take the place of 6 layers.
    assert (shape.window, shape.window_layers) == (2, tuple(range(1, 7)))
    assert (shape.window_blocks, shape.num_frames) == (1, 7)


@pytest.mark.parametrize(
    "sizes",
    [
        {"mamba_d_conv": 2},
        {"mamba_n_groups": 1},
        {"mamba_conv_bias": False, "mamba_proj_bias": True},
        {"mamba_d_head": 32, "mamba_n_heads": 4},
        {"mamba_d_state": 20},
    ],
)
def test_other_sizes(tiny_model: TinyModel, sizes: dict[str, Any]) -> None:
    check_tokens(tiny_model("bamba", **sizes))


@pytest.mark.parametrize("variant", [{"mamba_rms_norm": False}, {"mamba_norm_before_gate": True}])
def test_variants_of_falcon(tiny_model: TinyModel, variant: dict[str, Any]) -> None:
    check_tokens(tiny_model("falcon_h1", **variant))


@pytest.mark.parametrize(
    "sizes",
    [
        {"linear_conv_kernel_dim": 2},
        {"linear_num_value_heads": 2},
        {"linear_key_head_dim": 12, "linear_value_head_dim": 16},
        {"linear_key_head_dim": 128, "linear_value_head_dim": 64},
    ],
)
def test_other_sizes_of_delta_nets(tiny_model: TinyModel, sizes: dict[str, Any]) -> None:
    check_tokens(tiny_model("qwen3_next", **sizes))


@pytest.mark.parametrize("variant", [{"linear_allow_neg_eigval": False}, {"rope_parameters": None}])
def test_variants_of_olmo(tiny_model: TinyModel, variant: dict[str, Any]) -> None:
    check_tokens(tiny_model("olmo_hybrid", **variant))


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("kimi_linear", {"linear_conv_kernel_dim": 2, "linear_head_dim": 48, "linear_num_heads": 2}),
        ("kimi_linear", {"q_lora_rank": 96}),
        ("bailing_hybrid", {"kda_safe_gate": False}),
        ("bailing_hybrid", {"kda_lower_bound": -1.0, "head_dim": 32}),
        ("minimax", {"head_dim": 16, "block_size": 7}),
        ("minimax", {"hidden_act": "gelu"}),
    ],
)
def test_variants_of_kimi_and_minimax(
    architecture: str, tiny_model: TinyModel, values: dict[str, Any]
) -> None:
    check_tokens(tiny_model(architecture, **values))


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("mamba", {"conv_kernel": 2, "use_conv_bias": False}),
        ("falcon_mamba", {"state_size": 20, "time_step_rank": 3}),
        ("jamba", {"mamba_expand": 3, "mamba_d_state": 4}),
        ("mamba2", {"n_groups": 1, "use_bias": True}),
    ],
)
def test_variants_of_mamba(architecture: str, tiny_model: TinyModel, values: dict[str, Any]) -> None:
    check_tokens(tiny_model(architecture, **values))


def test_a_model_without_attention_has_room_for_little_else_than_states(load: Load) -> None:
    model = load("mamba2")
    assert model.heads.states is not None
    shape = model.kv_shape(16)
    assert shape.window_layers == tuple(range(1, shape.num_layers))
    unused = shape.block_bytes - model.heads.states.num_bytes
    assert 0 <= unused < 2 * shape.block_bytes / shape.num_layers


def check_tokens(folder: Path) -> None:
    engine = make_engine(load_model(str(folder), "float32", CPU), max_num_seqs=8, max_num_batched_tokens=20)
    prompt = make_prompt(70)
    [tokens] = run_in_order(engine, make_request("r", prompt, temperature=0.0))
    assert tokens == best_tokens(load_reference(folder), prompt, tokens)


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("bamba", {}),
        ("nemotron_h", {"time_step_min": 1e-9}),
        *((each, {}) for each in ("qwen3_next", "qwen3_5_text", "olmo_hybrid")),
        *((each, {}) for each in ("kimi_linear", "bailing_hybrid", "minimax")),
        ("zamba2", {"time_step_min": 1e-9}),
        *((each, {}) for each in ("mamba", "falcon_mamba", "mamba2", "jamba")),
    ],
)
def test_logprobs_are_near_those_of_transformers(
    architecture: str, values: dict[str, Any], tiny_model: TinyModel
) -> None:
    """transformers computes prompts in chunks, so its own bits depend on how a prompt is split."""
    folder = tiny_model(architecture, **values)
    model = load_model(str(folder), "float32", CPU)
    engine = make_engine(model, max_num_seqs=4, max_num_batched_tokens=20)
    prompt = make_prompt(70)
    found = generated(engine, make_request("r", prompt, temperature=0.0, num_logprobs=5, max_tokens=40))
    tokens = torch.tensor([prompt + [each.token_id for each in found]])
    with torch.inference_mode():
        logits = load_reference(folder)(tokens).logits[0, len(prompt) - 1 : -1]
    expected, limit = logits.log_softmax(-1), 1e-4 * float(logits.abs().max())
    for of_token, row in zip(found, expected, strict=True):
        assert of_token.logprobs is not None
        for token, logprob in of_token.logprobs.top:
            assert abs(logprob - float(row[token])) < limit


@each_kind
@pytest.mark.parametrize(
    ("num_equal", "num_cached"), [(16, 16), (17, 16), (31, 16), (48, 48), (63, 48), (64, 64)]
)
def test_a_prefix_hit_gives_the_same_bits(
    architecture: str, load: Load, num_equal: int, num_cached: int
) -> None:
    """It ends at a block, since a block that matches in part has no state of the tokens that match."""
    assert check_prefix_hit(load(architecture), num_equal) == num_cached


def test_a_hit_is_cut_to_the_last_state(bamba: LoadedModel) -> None:
    """States of blocks that a sequence has left are given up first, and the keys and values stay."""
    engine = make_engine(bamba, num_blocks=12, max_num_batched_tokens=64)
    first = make_prompt(97)
    run(engine, make_request("first", first, max_tokens=10))
    for seed in (1, 2):
        run(engine, make_request(f"other{seed}", make_prompt(60, seed=seed), max_tokens=1))
    params = {"temperature": 0.0, "max_tokens": 10, "num_logprobs": 3}
    for num_equal, num_cached in ((32, 0), (96, 96)):
        prompt = [*first[:num_equal], *make_prompt(8, seed=5)]
        warm = make_request("warm", prompt, **params)
        hashes = engine.tables.prefix_hashes(warm)[: num_equal // 16]
        assert all(each in engine.pool for each in hashes)
        cold = generated(make_engine(bamba), make_request("cold", prompt, **params))
        assert generated(engine, warm) == cold
        assert warm.num_cached_tokens == num_cached


@pytest.mark.slow
@pytest.mark.parametrize("is_swapped", [True, False])
@pytest.mark.parametrize(
    ("architecture", "seed"),
    [
        *(("bamba", seed) for seed in (0, 2, 3)),
        *(("qwen3_next", 0), ("olmo_hybrid", 3)),
        *(("kimi_linear", 0), ("bailing_hybrid", 2), ("minimax", 2), ("jamba", 2)),
    ],
)
def test_random_schedules(architecture: str, load: Load, seed: int, is_swapped: bool) -> None:
    check_random_schedule(load(architecture), seed, is_swapped=is_swapped)


def test_granite_without_states(tmp_path: Path) -> None:
    folder = make_random_model("granitemoehybrid", tmp_path, layer_types=["attention"] * 3)
    check_tokens(folder)


def test_what_is_not_supported_is_refused(bamba: LoadedModel, tiny_model: TinyModel) -> None:
    folder = str(tiny_model("bamba"))
    with pytest.raises(KvBudgetError, match="must be absent: "):
        make_engine(bamba).add_request(make_request("r", make_prompt(40), kv_budget_tokens=64))
    with pytest.raises(UnsupportedAdapterError, match="bamba does not"):
        check_adaptable(bamba)
    with pytest.raises(SettingError, match="8-bit blocks cannot hold"):
        bamba.kv_shape(16, "int8")
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "threads": 1}
    with pytest.raises(SettingError, match="layers with a state; choose a tensor-parallel size of 1"):
        LLM(folder, **options, tensor_parallel_size=2)
    with pytest.raises(SettingError, match="speculation must be off"):
        LLM(folder, **options, speculation="ngram")
    with pytest.raises(SettingError, match="speculation must be off"):
        LLM(str(tiny_model("llama")), **options, speculation=folder)


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("bamba", {"time_step_limit": (0.1, 0.5)}, "limit their time steps"),
        ("bamba", {"hidden_act": "gelu"}, "and not 'silu'"),
        ("bamba", {"mamba_d_state": 18}, "multiples of 4 and 16"),
        ("bamba", {"mamba_d_head": 8, "mamba_n_heads": 16}, "multiples of 4 and 16"),
        ("nemotron_h", {"time_step_min": 0.01}, "limit their time steps"),
        ("mamba", {"state_size": 18}, "multiples of 4 and 16"),
        ("mamba", {"hidden_act": "gelu"}, "and not 'silu'"),
        ("qwen3_next", {"hidden_act": "gelu"}, "and not 'silu'"),
        ("qwen3_next", {"linear_value_head_dim": 24}, "multiples of 4 and 16"),
        ("kimi_linear", {"hidden_act": "gelu"}, "and not 'silu'"),
        ("bailing_hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound is 0.5"),
        ("minimax", {"head_dim": 24}, "multiples of 4 and 16"),
        ("minimax", {"sliding_window": 24}, "layers with a state beside layers with a window"),
    ],
)
def test_variants_that_are_refused(
    architecture: str, tiny_model: TinyModel, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tiny_model(architecture, **values)), "float32", CPU)


def test_a_pool_too_small_for_the_states_of_a_step_is_refused(bamba: LoadedModel) -> None:
    config = EngineConfig(num_blocks=34, max_num_batched_tokens=512)
    with pytest.raises(SettingError, match="a prompt needs 35: raise block_size or num_blocks"):
        allocate_pool(config, bamba, None, CPU)
    assert allocate_pool(replace(config, block_size=256), bamba, None, CPU).num_blocks == 34


def test_blocks_too_small_for_a_row_of_a_state_are_refused() -> None:
    with pytest.raises(SettingError, match=r"a block of 1 tokens .*: raise the block size"):
        with_states(KvShape(1, 1, 1, 16, "float32"), StateShape(1, 4, 64))


@each_kind
def test_bfloat16(architecture: str, tiny_model: TinyModel) -> None:
    """States are float32 whatever the dtype: chunks and single tokens give the same tokens."""
    model = load_model(str(tiny_model(architecture)), "bfloat16", CPU)
    assert model.dtype == torch.bfloat16
    prompt = make_prompt(90)
    params = {"temperature": 0.0, "num_logprobs": 3}
    whole = generated(make_engine(model), make_request("r", prompt, **params))
    split = make_engine(model, max_num_seqs=4, max_num_batched_tokens=7)
    assert generated(split, make_request("r", prompt, **params)) == whole
