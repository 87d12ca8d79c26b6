"""Models whose linear layers have weights in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from quire.engine.model.layers.packed_linear import PackedEmbedding, PackedLinear, pack_linear_layers
from quire.engine.weights.loader import load_model
from quire.kernels.cpu.intrinsics import GROUP
from quire.kernels.cpu.products.integer_product import MOST_INPUTS
from quire.kernels.cpu.products.quantized_weight import QUANTIZED, quantize
from quire.settings.setting import SettingError
from tests.testing.tiny_engine import make_engine, make_prompt, make_request, run_in_order, run_mixed
from tests.testing.tiny_models import generate_greedy, make_random_model

CPU = torch.device("cpu")
NUM_NEW = 48


def generate_dequantized(folder: Path, weight_dtype: str, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy tokens of transformers with the weights that the integers stand for."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.weight.data.copy_(quantize(module.weight.data, weight_dtype).unpack())
        elif type(module) is Conv1D:
            module.weight.data.copy_(quantize(module.weight.data.T, weight_dtype).unpack().T)
    return [generate_greedy(model, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize(("architecture", "is_tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_tokens_are_those_of_the_dequantized_weights(
    tmp_path: Path, architecture: str, is_tied: bool, weight_dtype: str
) -> None:
    folder = make_random_model(architecture, tmp_path, tie_word_embeddings=is_tied)
    model = load_model(str(folder), "float32", CPU, weight_dtype)
    assert model.recipe is not None
    prompts = [make_prompt(length) for length in (1, 16, 50)]
    expected = generate_dequantized(folder, weight_dtype, prompts)
    for each in (model, replace(model, recipe=None)):
        requests = (
            make_request(str(index), prompt, temperature=0.0, max_tokens=NUM_NEW)
            for index, prompt in enumerate(prompts)
        )
        assert run_in_order(make_engine(each), *requests) == expected


@pytest.mark.parametrize(
    ("architecture", "dtype", "weight_dtype"),
    [
        ("phi3", "float32", "int8"),
        ("gemma3", "float32", "int4"),
        ("gemma3", "bfloat16", "w8a8"),
        ("gpt2", "bfloat16", "w8a8"),
        ("gemma3", "float32", "w4a8"),
        ("llama", "bfloat16", "w4a8"),
    ],
)
def test_a_program_gives_the_bits_of_the_modules(
    tmp_path: Path, architecture: str, dtype: str, weight_dtype: str
) -> None:
    folder = make_random_model(architecture, tmp_path, tie_word_embeddings=True)
    model = load_model(str(folder), dtype, CPU, weight_dtype)
    assert model.recipe is not None
    assert run_mixed(model, "auto") == run_mixed(replace(model, recipe=None), "auto")


@pytest.mark.slow
def test_each_weight_dtype_is_another_model(tiny_model: Callable[[str], Path]) -> None:
    folder = str(tiny_model("llama"))
    digests = {load_model(folder, "float32", CPU, each).digest for each in ("auto", *QUANTIZED, "w8a8")}
    assert len(digests) == 5


def test_all_linear_layers_are_quantized_and_nothing_else_is_kept(tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path, tie_word_embeddings=True)
    module = load_model(str(folder), "float32", CPU, "int8").module
    packed = [each for each in module.modules() if isinstance(each, PackedLinear)]
    assert len(packed) == 7 * 3 + 1
    assert {each.packed.panels.dtype for each in packed} == {torch.uint8}
    embedding = module.get_input_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.packed is module.lm_head.packed
    assert all(parameter.dim() == 1 for parameter in module.parameters())


def test_a_layer_that_has_no_whole_groups_is_refused(tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path, intermediate_size=100)
    with pytest.raises(SettingError, match="weights cannot be int8: down_proj has 100 inputs"):
        load_model(str(folder), "float32", CPU, "int8")


def test_a_sum_that_could_overflow_is_refused() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(MOST_INPUTS + GROUP, 1))
    with pytest.raises(SettingError, match="weights cannot be w8a8: 0 has more than 65536 inputs"):
        pack_linear_layers(layer, "w8a8")


def test_a_gpu_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(SettingError, match="weights can be int8 only on the CPU"):
        load_model(str(tiny_model("llama")), "float32", torch.device("cuda"), "int8")
