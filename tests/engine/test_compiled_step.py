"""A step as one program gives the same bits as the model's modules, or is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.model.program.checked_recipe import find_recipe
from quire.engine.model.program.recipe import NoRecipeError
from quire.engine.model.program.recipe_reader import read_recipe
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kernels.cpu.products.bfloat16_product import prefers_pair_products
from quire.kernels.cpu.products.integer_weight import quantize_to_integers
from tests.testing.tiny_engine import generated, make_engine, make_prompt, make_request, run_mixed
from tests.testing.tiny_models import make_random_model

COVERED = [
    *("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "arcee", "gemma2", "gemma3"),
    *("gpt2", "opt", "glm4_moe_lite", "youtu", "bamba", "qwen3_5_text"),
]
WITH_MODULES = [
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe", "phimoe"),
    *("lfm2", "qwen3_next", "deepseek_v3", "kimi_linear", "bailing_hybrid"),
    *("granitemoehybrid", "minimax"),
]
LATENTS = ("glm4_moe_lite", "youtu")
"""Their attention is left to modules where linear layers read pairs of inputs."""
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", COVERED + WITH_MODULES)
def test_a_program_gives_the_bits_of_the_modules(
    tiny_model: Callable[[str], Path], architecture: str, dtype: str
) -> None:
    model = load_model(str(tiny_model(architecture)), dtype, CPU)
    assert model.recipe is not None
    needs_pairs = dtype == "bfloat16" and prefers_pair_products()
    assert model.recipe.has_modules == (
        architecture in WITH_MODULES or (needs_pairs and architecture in LATENTS)
    )
    assert run_mixed(model, "auto") == run_mixed(replace(model, recipe=None), "auto")


def test_little_is_left_to_modules(tiny_model: Callable[[str], Path]) -> None:
    recipe = load_model(str(tiny_model("qwen3_next")), "float32", CPU).recipe
    assert recipe is not None
    assert [each.is_gated for each in recipe.attentions] == [True]
    assert len(recipe.states) == len(recipe.layers) - 1
    assert len(recipe.mlps) + sum(layer.shared is not None for layer in recipe.layers) == len(recipe.layers)
    recipe = load_model(str(tiny_model("lfm2")), "float32", CPU).recipe
    assert recipe is not None
    assert len(recipe.mlps) == len(recipe.layers)


def test_an_expert_of_all_tokens_may_lie_beside_the_others(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("granitemoehybrid", shared_intermediate_size=64, residual_multiplier=0.7)
    model = load_model(str(folder), "bfloat16", CPU)
    assert model.recipe is not None
    assert all(layer.shared is not None for layer in model.recipe.layers)
    assert run_mixed(model, "auto") == run_mixed(replace(model, recipe=None), "auto")


def test_states_stay_modules_if_their_weights_need_other_inputs(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_model("qwen3_5_text")), "float32", CPU)
    layer = next(each for each in model.module.modules() if hasattr(each, "in_proj_qkv"))
    layer.in_proj_z = PackedLinear(quantize_to_integers(layer.in_proj_z.weight))
    recipe = find_recipe(model.module, model.heads, model.vocab_size, 512)
    assert recipe is not None
    assert not recipe.states
    assert recipe.mlps


def test_attention_that_reads_positions_is_left_to_its_module(tiny_model: Callable[[str], Path]) -> None:
    """Its queries grow from position 16,384 on, and the check of the program ends before."""
    recipe = load_model(str(tiny_model("ministral3")), "float32", CPU).recipe
    assert recipe is not None
    assert not recipe.attentions
    assert len(recipe.mlps) == len(recipe.layers)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_blocks_of_8_bits_get_the_same_bits(tiny_model: Callable[[str], Path], kv_cache_dtype: str) -> None:
    for architecture in ("llama", "gemma3", "glm4_moe_lite"):
        model = load_model(str(tiny_model(architecture)), "bfloat16", CPU)
        assert run_mixed(model, kv_cache_dtype) == run_mixed(replace(model, recipe=None), kv_cache_dtype)


@pytest.mark.slow
def test_float16_has_a_program_too(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_model("llama")), "float16", CPU)
    assert model.recipe is not None
    assert run_mixed(model, "auto", block_size=8) == run_mixed(
        replace(model, recipe=None), "auto", block_size=8
    )


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path, tie_word_embeddings=True)
    model = load_model(str(folder), "float32", CPU)
    assert model.recipe is not None
    sizes = [parameter.numel() for parameter in model.module.parameters()]
    assert max(sizes) == model.module.config.hidden_size
    assert run_mixed(model, "auto") == run_mixed(replace(model, recipe=None), "auto")


def test_threads_do_not_change_the_bits(tiny_model: Callable[..., Path]) -> None:
    # A step of these sizes has enough work for several threads.
    for architecture in ("llama", "youtu", "qwen3_5_text", "kimi_linear"):
        folder = tiny_model(architecture, hidden_size=256, intermediate_size=704)
        check_threads(load_model(str(folder), "float32", CPU))


def check_threads(model: LoadedModel) -> None:
    torch.set_num_threads(1)
    expected = run_mixed(model, "auto")
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert run_mixed(model, "auto") == expected


def test_a_model_of_another_shape_runs_by_its_modules(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert load_model(str(tiny_model("gpt_neox")), "float32", CPU).recipe is None
    assert "gpt_neox runs module by module: GPTNeoXForCausalLM has another shape" in caplog.text


def test_a_module_without_a_place_is_not_ignored(tiny_model: Callable[[str], Path]) -> None:
    module = load_model(str(tiny_model("llama")), "float32", CPU).module
    module.model.layers[1].mlp.extra = torch.nn.Linear(3, 3)
    with pytest.raises(NoRecipeError, match=r"layers\.1\.mlp\.extra \(Linear\) has no place"):
        read_recipe(module)


def test_a_layer_without_a_known_part_is_no_error(tiny_model: Callable[[str], Path]) -> None:
    module = load_model(str(tiny_model("llama")), "float32", CPU).module
    del module.model.layers[1].mlp
    problem = "LlamaForCausalLM has another shape than Llama, GPT-2 and OPT: LlamaDecoderLayer has no mlp"
    with pytest.raises(NoRecipeError, match=f"^{problem}$"):
        read_recipe(module)


def test_arithmetic_that_modules_hide_is_noticed(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(str(tiny_model("llama")), "float32", CPU)
    model.module.model.layers[2].mlp.register_forward_hook(lambda _, __, output: output * 1.0001)
    with caplog.at_level(logging.INFO):
        assert find_recipe(model.module, model.heads, model.vocab_size, 512) is None
    assert "as one program it would give other bits" in caplog.text


def test_positions_far_from_the_prompts_are_compared(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_model("llama")), "float32", CPU)
    rotary = model.module.model.rotary_emb
    forward = rotary.forward

    def other_at_the_end(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        is_short = position_ids.shape[-1] < 512
        return forward(x, torch.where((position_ids > 480) & is_short, 0, position_ids))  # type: ignore[no-any-return]

    rotary.forward = other_at_the_end
    assert find_recipe(model.module, model.heads, model.vocab_size, 512) is None


@pytest.mark.parametrize(
    ("rope", "num_positions"),
    [
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, 600),
        (
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 600,
            },
            1200,
        ),
    ],
)
def test_the_table_of_rotations_ends_with_the_positions(
    tmp_path: Path, rope: dict[str, Any], num_positions: int
) -> None:
    # Beyond 600 positions, transformers rotates all of them in another way.
    sizes = {"max_position_embeddings": num_positions, "head_dim": 16}
    path = make_random_model("llama", tmp_path, rope_parameters=rope, **sizes)
    model = load_model(str(path), "float32", CPU)
    assert model.max_position_embeddings == 600
    assert model.recipe is not None
    engine = make_engine(model, num_blocks=200)
    first, long, again = (
        generated(engine, make_request(name, make_prompt(length), max_tokens=4, num_logprobs=3))
        for name, length in (("first", 100), ("long", 580), ("again", 100))
    )
    assert len(long) == 4
    assert again == first
