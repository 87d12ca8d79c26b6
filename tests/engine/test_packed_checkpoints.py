"""Quantized checkpoints run from their stored codes, with the bits of the dequantized weights in float32."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers import attention
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.weights.loader import LoadedModel, load_model
from quire.engine.weights.sliced_weights import load_slices
from quire.engine.weights.weights_file import WeightsFile
from quire.kernels.cpu.products.coded_product import E2M1, E4M3, INT4, INT8, UINT4
from quire.kernels.cpu.products.coded_weight import CodedWeight
from quire.kernels.cpu.products.integer_weight import IntegerWeight, quantize_rows
from quire.llm import LLM, SamplingParams
from tests.testing.quantized_weights import awq, compressed_integers, gptq, mxfp4, save_quantized, scaled
from tests.testing.tiny_engine import make_prompt
from tests.testing.tiny_models import make_random_model

CPU = torch.device("cpu")
NOTHING = "no name has this"


def compressed(activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def rows_of(dtype: torch.dtype) -> Any:
    return lambda weight: scaled(weight, dtype, (1, weight.shape[1]))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
TOKENS = {"dynamic": True, "strategy": "token", "num_bits": 8, "type": "int", "symmetric": True}
W8A8 = compressed(TOKENS, num_bits=8, type="int", strategy="channel"), rows_of(torch.int8)
FORMS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "gptq": (GPTQ, gptq, UINT4),
    "gptq-symmetric": ({**GPTQ, "sym": True}, partial(gptq, is_symmetric=True), INT4),
    "awq": ({**GPTQ, "quant_method": "awq"}, awq, UINT4),
    "w4a16": (compressed(num_bits=4), compressed_integers, INT4),
    "int8": (compressed(num_bits=8), rows_of(torch.int8), INT8),
    "gptq-8": ({**GPTQ, "bits": 8, "sym": True}, partial(gptq, bits=8, is_symmetric=True), INT8),
    "fp8-rows": ({"quant_method": "fbgemm_fp8"}, rows_of(torch.float8_e4m3fn), E4M3),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [40, 32]},
        lambda weight: scaled(weight, torch.float8_e4m3fn, (40, 32), "_scale_inv"),
        E4M3,
    ),
}


def save(
    name: str, folder: Path, left_out: str = "layers.1.self_attn.k_proj", **sizes: Any
) -> tuple[Path, Path]:
    """Save a quantized model, and one with the weights that its codes stand for; return both folders."""
    plain = make_random_model("llama", folder / "plain", **sizes)
    configuration, quantize = W8A8 if name == "w8a8" else FORMS[name][:2]
    save_quantized(plain, folder / "quantized", configuration, quantize, "_proj.", left_out)
    return folder / "quantized", plain


def answers(folder: Path, **settings: Any) -> list[Any]:
    """Return the tokens and their probabilities for a long and a short prompt."""
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)
    with LLM(str(folder), num_blocks=64, threads=1, **settings) as llm:
        outputs = llm.generate([make_prompt(40), make_prompt(7)], params, use_tqdm=False)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def packed_types(model: LoadedModel) -> list[Any]:
    """Return the types of the packed weights of the layers that are quantized."""
    layers = [each for each in model.module.modules() if isinstance(each, PackedLinear)]
    return [each.packed.stored for each in layers if isinstance(each.packed, CodedWeight | IntegerWeight)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("gptq", "w4a16") else pytest.mark.slow) for name in FORMS],
)
def test_logits_have_the_bits_of_the_dequantized_weights(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = save(name, tmp_path)
    with caplog.at_level(logging.INFO, "quire.engine.weights"):
        model = load_model(str(quantized), "float32", CPU)
    # One of the 21 layers is left out.
    assert packed_types(model) == [FORMS[name][2]] * 20
    assert any(
        "20 tensors" in each.getMessage() and "run packed" in each.getMessage() for each in caplog.records
    )
    assert answers(quantized) == answers(plain)


def test_w8a8_rounds_inputs_and_sums_integers(tmp_path: Path) -> None:
    quantized, _ = save("w8a8", tmp_path, NOTHING)
    model = load_model(str(quantized), "float32", CPU)
    layer = model.module.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, PackedLinear)
    assert isinstance(layer.packed, IntegerWeight)
    stored = load_file(quantized / "model.safetensors")
    integers, scales = (stored[f"model.layers.0.mlp.up_proj.{each}"] for each in ("weight", "weight_scale"))
    inputs = torch.randn((5, 64), generator=torch.Generator().manual_seed(1))
    rows, row_scales = quantize_rows(inputs)
    expected = (rows.long() @ integers.long().T).float() * (row_scales * scales[:, 0])
    assert torch.equal(layer(inputs), expected)
    assert model.recipe is not None


def test_ranks_refuse_w8a8(tmp_path: Path) -> None:
    attention.register()
    quantized, _ = save("w8a8", tmp_path, intermediate_size=256)
    with pytest.raises(UnsupportedModelError, match="ranks cannot divide W8A8 layers"):
        load_slices(quantized, AutoConfig.from_pretrained(quantized), torch.float32, 0, 2)


def test_a_scale_that_differs_within_a_group_of_the_kernels_is_dequantized(tmp_path: Path) -> None:
    plain = make_random_model("llama", tmp_path / "plain")
    settings = {"quant_method": "fp8", "weight_block_size": [40, 56]}
    save_quantized(
        plain,
        tmp_path / "quantized",
        settings,
        lambda weight: scaled(weight, torch.float8_e4m3fn, (40, 56), "_scale_inv"),
        "_proj.",
    )
    assert not packed_types(load_model(str(tmp_path / "quantized"), "float32", CPU))


def test_another_weight_type_is_made_of_dequantized_weights(tmp_path: Path) -> None:
    quantized, _ = save("gptq", tmp_path)
    model = load_model(str(quantized), "float32", CPU, "int8")
    assert not [each for each in packed_types(model) if each == UINT4]


def test_the_digest_covers_the_stored_bytes(tmp_path: Path) -> None:
    quantized, plain = save("gptq", tmp_path)
    first = load_model(str(quantized), "float32", CPU)
    assert load_model(str(quantized), "float32", CPU).digest == first.digest
    assert load_model(str(plain), "float32", CPU).digest != first.digest
    path = quantized / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["model.layers.0.mlp.up_proj.scales"][0, 0] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    assert load_model(str(quantized), "float32", CPU).digest != first.digest


def test_workers_share_packed_weights(tmp_path: Path, file: WeightsFile) -> None:
    quantized, _ = save("gptq", tmp_path)
    alone = load_model(str(quantized), "float32", CPU)
    models = [load_model(str(quantized), "float32", CPU, weights_file=file) for _ in range(2)]
    for model in models:
        assert model.shared_bytes > 0
        assert model.digest == alone.digest
        assert packed_types(model) == packed_types(alone)
        layers = [each.module.get_submodule("model.layers.2.mlp.down_proj") for each in (model, alone)]
        assert torch.equal(layers[0].packed.panels, layers[1].packed.panels)


def test_experts_of_mxfp4_stay_packed(tmp_path: Path) -> None:
    plain = make_random_model("gpt_oss", tmp_path / "plain")
    quantized = tmp_path / "quantized"
    save_quantized(plain, quantized, {"quant_method": "mxfp4"}, mxfp4, ".experts.")
    model = load_model(str(quantized), "float32", CPU)
    groups = [each.packed for each in model.module.modules() if hasattr(each, "has_post_expert_norm")]
    assert len(groups) == 3
    for both in groups:
        assert {each.stored for group in (both.up, both.down) for each in group.weights} == {E2M1}
    assert answers(quantized) == answers(plain)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_ranks_divide_experts_of_mxfp4(tmp_path: Path) -> None:
    plain, quantized = make_random_model("gpt_oss", tmp_path / "plain"), tmp_path / "quantized"
    save_quantized(plain, quantized, {"quant_method": "mxfp4"}, mxfp4, ".experts.")
    attention.register()
    *_, packed = load_slices(quantized, AutoConfig.from_pretrained(quantized), torch.float32, 1, 2)
    assert [(len(each), each[0].stored) for each in packed.values()] == [(2, E2M1)] * 6
    assert answers(quantized, tensor_parallel_size=2) == answers(quantized)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    quantized, _ = save("gptq", tmp_path, intermediate_size=256)
    assert answers(quantized, tensor_parallel_size=2) == answers(quantized)


@pytest.mark.slow
def test_bfloat16_models_multiply_the_stored_weights(tmp_path: Path) -> None:
    """A step of one program has the bits of modules, also where the output layer has another type."""
    quantized, _ = save("gptq", tmp_path, NOTHING)
    model = load_model(str(quantized), "bfloat16", CPU)
    assert model.recipe is not None
    assert packed_types(model) == [UINT4] * 21
