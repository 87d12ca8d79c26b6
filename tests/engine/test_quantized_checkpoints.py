"""Checkpoints of other quantizers load as the weights that they stand for, or are refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers import attention
from quire.engine.weights.checkpoint import Checkpoint
from quire.engine.weights.loader import load_model
from quire.engine.weights.quantization import Quantization, read_quantization
from quire.engine.weights.sliced_weights import load_slices
from quire.engine.weights.weights_file import WeightsFile
from quire.llm import LLM, SamplingParams
from quire.models.file_checks import ModelFileError
from tests.testing.quantized_weights import (
    Quantized,
    awq,
    compressed_integers,
    gptq,
    mxfp4,
    save_quantized,
    scaled,
)
from tests.testing.tiny_engine import make_engine, make_prompt, make_request, run_in_order, run_mixed
from tests.testing.tiny_models import make_random_model

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(layout: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


class Form(NamedTuple):
    """A form of quantized checkpoint: its configuration, how a weight is packed, and a model with it."""

    configuration: dict[str, Any]
    quantize: Callable[[torch.Tensor], Quantized]
    architecture: str = "llama"


def groups_of(weight: torch.Tensor) -> torch.Tensor:
    """Return groups of 32 inputs that are spread over all inputs, as ``desc_act`` does."""
    return torch.arange(weight.shape[1]) % (weight.shape[1] // 32)


def in_blocks(weight: torch.Tensor) -> Quantized:
    """Store FP8 with blocks that do not divide the weight's 64, 96 or 128 outputs and inputs."""
    return scaled(weight, E4M3, (40, 56), "_scale_inv")


def per_row(dtype: torch.dtype) -> Callable[[torch.Tensor], Quantized]:
    return lambda weight: scaled(weight, dtype, (1, weight.shape[1]), scale_dtype=torch.bfloat16)


def per_tensor(weight: torch.Tensor) -> Quantized:
    each = scaled(weight, E4M3, (weight.shape[0], weight.shape[1]))
    return Quantized({**each.stored, ".weight_scale": each.stored[".weight_scale"].reshape(())}, each.weight)


FORMS = {
    "gptq-2": Form({**GPTQ, "bits": 2}, partial(gptq, bits=2)),
    "gptq-4": Form({**GPTQ, "checkpoint_format": "gptq"}, gptq),
    "gptq-8": Form({**GPTQ, "bits": 8}, partial(gptq, bits=8)),
    "gptq-v2": Form({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, version=2)),
    "gptq-order": Form({**GPTQ, "desc_act": True}, lambda weight: gptq(weight, groups=groups_of(weight))),
    "gptq-whole": Form({**GPTQ, "group_size": -1}, lambda weight: gptq(weight, group_size=weight.shape[1])),
    "gptq-experts": Form(GPTQ, gptq, "qwen3_moe"),
    # Files that name one version and contain the zero points of the other.
    "gptq-not-v1": Form({**GPTQ, "sym": True}, partial(gptq, version=2, is_symmetric=True)),
    "gptq-not-v2": Form(
        {**GPTQ, "sym": True, "checkpoint_format": "gptq_v2"}, partial(gptq, is_symmetric=True)
    ),
    "awq": Form(AWQ, awq),
    "fp8-tensor": Form(FP8, per_tensor),
    "fp8-rows": Form({"quant_method": "fbgemm_fp8"}, per_row(E4M3)),
    "fp8-blocks": Form({**FP8, "weight_block_size": [40, 56]}, in_blocks),
    "fp8-experts": Form({**FP8, "weight_block_size": [40, 56]}, in_blocks, "qwen3_moe"),
    "compressed-fp8": Form(
        compressed("float-quantized", {"dynamic": True}, num_bits=8, type="float"), per_row(E4M3)
    ),
    "compressed-blocks": Form(
        compressed("naive-quantized", num_bits=8, type="float", block_structure=[40, 56]),
        lambda weight: scaled(weight, E4M3, (40, 56)),
    ),
    "compressed-int8": Form(
        compressed("int-quantized", {"dynamic": True}, num_bits=8, type="int"), per_row(torch.int8)
    ),
    "compressed-groups": Form(
        compressed("naive-quantized", num_bits=8, type="int"),
        lambda weight: scaled(weight, torch.int8, (1, 32)),
    ),
    "compressed-packed": Form(compressed("pack-quantized", num_bits=4), compressed_integers),
    "compressed-zeros": Form(
        compressed("pack-quantized", num_bits=4, symmetric=False),
        partial(compressed_integers, is_symmetric=False),
    ),
    "compressed-order": Form(
        compressed("pack-quantized", num_bits=4, symmetric=False),
        lambda weight: compressed_integers(weight, is_symmetric=False, groups=groups_of(weight)),
    ),
    "compressed-8": Form(compressed("pack-quantized", num_bits=8), partial(compressed_integers, bits=8)),
    "mxfp4": Form({"quant_method": "mxfp4"}, mxfp4, "gpt_oss"),
}


def save(name: str, folder: Path, **sizes: int) -> tuple[Path, Path]:
    """Save a model in a form, and the same weights without quantization; return the folders of both."""
    form = FORMS[name]
    plain = make_random_model(form.architecture, folder / "plain", **sizes)
    layers = ".experts." if form.architecture == "gpt_oss" else "_proj"
    save_quantized(plain, folder / "quantized", form.configuration, form.quantize, layers)
    return folder / "quantized", plain


@pytest.mark.parametrize("name", FORMS)
def test_tensors_are_those_of_the_plain_checkpoint(name: str, tmp_path: Path) -> None:
    quantized, plain = save(name, tmp_path)
    expected = load_file(plain / "model.safetensors")
    with Checkpoint(quantized) as checkpoint:
        assert checkpoint.names == set(expected)
        assert len(checkpoint._parts) > 5
        assert checkpoint.dtype == torch.float32
        for each, tensor in expected.items():
            assert torch.equal(checkpoint.read(each, None), tensor), each
            if tensor.ndim == 2:
                assert torch.equal(checkpoint.read(each, (0, slice(8, 24))), tensor[8:24])
                assert torch.equal(checkpoint.read(each, (1, slice(8, 24))), tensor[:, 8:24])


@pytest.mark.parametrize("name", ["gptq-order", "awq", "fp8-experts", "compressed-zeros", "mxfp4"])
def test_the_engine_answers_as_with_the_plain_checkpoint(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers, states = [], []
    with caplog.at_level(logging.INFO, "quire.engine.weights"):
        for folder in save(name, tmp_path):
            model = load_model(str(folder), "auto", CPU)
            states.append({each: tensor for each, tensor in model.module.state_dict().items()})
            request = make_request("a", make_prompt(40), temperature=0.0, max_tokens=24)
            answers.append(run_in_order(make_engine(model), request))
    assert answers[0] == answers[1]
    assert states[0].keys() == states[1].keys()
    method = str(FORMS[name].configuration["quant_method"])
    (line,) = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert method in line
    assert "MiB" in line


def test_workers_share_weights_whose_layers_with_states_need_other_inputs(
    tmp_path: Path, file: WeightsFile
) -> None:
    plain, activations = make_random_model("qwen3_5_text", tmp_path / "plain"), {"num_bits": 8, "type": "int"}
    of_tokens = compressed(
        "int-quantized", {"dynamic": True, "strategy": "token", **activations}, **activations
    )
    save_quantized(plain, tmp_path / "quantized", of_tokens, per_row(torch.int8), left_out="linear_attn")
    for _ in range(2):
        model = load_model(str(tmp_path / "quantized"), "float32", CPU, weights_file=file)
        assert model.recipe is not None
        assert not model.recipe.states
        assert run_mixed(model, "auto") == run_mixed(dataclasses.replace(model, recipe=None), "auto")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq-order", "fp8-blocks"])
def test_two_ranks_answer_as_one_with_the_plain_checkpoint(name: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)
    answers, digests = [], []
    quantized, plain = save(name, tmp_path, intermediate_size=256)
    for folder, num_ranks in ((plain, 1), (quantized, 1), (quantized, 2)):
        with LLM(str(folder), num_blocks=64, threads=1, tensor_parallel_size=num_ranks) as llm:
            outputs = llm.generate([make_prompt(40), make_prompt(7)], params, use_tqdm=False)
            answers.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
            digests.append(llm.engine.model.digest)
    assert answers[0] == answers[1] == answers[2]
    assert digests[1] == digests[2]


def test_a_bias_of_zeros_that_the_model_lacks_is_left_out(tmp_path: Path) -> None:
    attention.register()
    quantized, _ = save("gptq-4", tmp_path, intermediate_size=256)
    bias = "model.layers.0.mlp.up_proj.bias"
    change(quantized, lambda tensors: tensors.update({bias: torch.zeros(256)}))
    config = AutoConfig.from_pretrained(quantized)
    load_slices(quantized, config, None, 0, 2)
    change(quantized, lambda tensors: tensors.update({bias: torch.ones(256)}))
    with pytest.raises(UnsupportedModelError, match=bias):
        load_slices(quantized, config, None, 0, 2)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def remove(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def replace(name: str, convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda tensors: tensors.update({name: convert(tensors[name]).contiguous()})


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq-4", remove(f"{UP}.scales"), rf"{UP}.qweight that has no scale {UP}.scales"),
        ("gptq-4", remove(f"{UP}.qzeros"), rf"{UP}.qweight that has no {UP}.qzeros"),
        ("gptq-order", remove(f"{UP}.g_idx"), rf"{UP}.qweight that has no {UP}.g_idx"),
        ("gptq-4", replace(f"{UP}.g_idx", lambda each: each + 1), rf"{UP}.g_idx that does not name one of"),
        (
            "gptq-4",
            replace(f"{UP}.qweight", lambda each: each.short()),
            rf"{UP}.qweight that is I16 instead of I32",
        ),
        ("gptq-4", replace(f"{UP}.scales", lambda each: each[:1]), rf"{UP}.scales that has the shape \(1, 9"),
        ("gptq-4", replace(f"{UP}.scales", lambda each: each.int()), rf"{UP}.scales that is torch.int32"),
        ("fp8-tensor", replace(f"{UP}.weight", lambda each: each.char()), rf"{UP}.weight that is I8, which"),
        ("awq", replace(f"{UP}.qzeros", lambda each: each[:, 1:]), rf"{UP}.qzeros that has the shape"),
        ("fp8-blocks", remove(f"{UP}.weight_scale_inv"), rf"{UP}.weight that has no scale .*_scale_inv or"),
        (
            "fp8-blocks",
            replace(f"{UP}.weight_scale_inv", lambda each: each[:1]),
            rf"{UP}.weight_scale_inv that has the shape \(1, 2\) for weights of shape \(96, 64\)",
        ),
        (
            "compressed-packed",
            replace(f"{UP}.weight_packed", lambda each: each[:, 1:]),
            rf"{UP}.weight_packed that has the shape \(96, 7\)",
        ),
        (
            "mxfp4",
            replace("model.layers.0.mlp.experts.down_proj_scales", lambda each: each[1:]),
            r"down_proj_scales that has the shape \(3, 64, 3\)",
        ),
    ],
)
def test_a_damaged_tensor_is_named(
    name: str, edit: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path
) -> None:
    quantized, _ = save(name, tmp_path)
    change(quantized, edit)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model(str(quantized), "auto", CPU)
    assert str(caught.value).startswith(str(quantized / "model.safetensors"))
    assert "\n" not in str(caught.value)


def test_quantized_weights_without_a_configuration_are_refused(tmp_path: Path) -> None:
    quantized, plain = save("gptq-4", tmp_path)
    shutil.copy(plain / "config.json", quantized)
    with pytest.raises(UnsupportedModelError, match=r"qweight is a quantized weight, but config.json has no"):
        load_model(str(quantized), "auto", CPU)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_weights_of_8_bits_without_a_configuration_are_refused(
    dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    """Without their scales, they would be other weights."""
    _, plain = save("gptq-4", tmp_path)
    tensors = load_file(plain / "model.safetensors")
    wrong = "model.layers.0.mlp.up_proj.weight"
    tensors[wrong] = tensors[wrong].to(dtype)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    message = rf"model\.safetensors has a tensor {wrong} that is {name}, but config\.json has no quantization"
    with pytest.raises(ModelFileError, match=message):
        load_model(str(plain), "auto", CPU)


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ({**GPTQ, "bits": 3}, "bits 3 of gptq is not read: quire reads only 2 or 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin of gptq"),
        ({**GPTQ, "dynamic": {"-:a": {}, "+:b": {"bits": 8}}}, r"dynamic of gptq .* '\+:b'"),
        ({**AWQ, "version": "gemv"}, "version gemv of awq"),
        ({**AWQ, "bits": 8}, "bits 8 of awq"),
        ({"quant_method": "awq"}, "quantization_config of config.json cannot be read: KeyError"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme static of fp8"),
        ({**FP8, "weight_block_size": [0, 1]}, "a block has"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "with bitsandbytes is not read"),
        ({"load_in_8bit": True}, "with bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4 is not read"),
        ({"quant_method": "hqq"}, "with hqq"),
        ({"quant_method": "gguf"}, "with gguf"),
        ({"quant_method": "new"}, "with new is not read: quire reads GPTQ, AWQ"),
        (compressed("nvfp4-pack-quantized"), "NVFP4 is not read"),
        (compressed("marlin-24"), "format marlin-24 of compressed-tensors"),
        (compressed("pack-quantized", num_bits=3), "num_bits 3 of compressed-tensors"),
        (compressed("float-quantized", {"dynamic": False}), "input_activations.dynamic False"),
        ({**compressed("dense"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme of compressed"),
        ({**compressed("dense"), "transform_config": {"a": 1}}, "transform_config of compressed-tensors"),
        ({**compressed("dense"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_other_quantizations_are_refused_by_name(configuration: dict[str, Any], message: str) -> None:
    for outer in ("quantization_config", "compression_config"):
        with pytest.raises(UnsupportedModelError, match=message.replace("quantization_config", outer)):
            read_quantization({outer: configuration})
    with pytest.raises(UnsupportedModelError):
        read_quantization({"text_config": {"quantization_config": configuration}})


def test_a_configuration_without_quantization_is_plain() -> None:
    assert read_quantization(json.loads('{"quantization_config": null}')) is None
    assert read_quantization({"quantization_config": FP8}) == Quantization("fp8")
