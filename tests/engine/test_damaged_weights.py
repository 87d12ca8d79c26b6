"""Whole files whose tensors are not those of the model: one line names the tensor; no weight is random."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quire.benchmarks.model_survey import make_tiny_model
from quire.engine.model.check import UnsupportedModelError
from quire.engine.weights.checkpoint import Checkpoint
from quire.engine.weights.loader import load_model
from quire.engine.weights.sliced_weights import load_slices
from quire.models.file_checks import REMEDY, ModelFileError

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
NORM, QUERY, HEAD = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a copy of a Llama with an output layer of its own."""
    return Path(shutil.copytree(tiny_model("llama", intermediate_size=128), tmp_path / "model"))


def change(model: Path, how: Callable[[Tensors], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    how(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", [NORM, QUERY, HEAD])
def test_a_missing_tensor_is_refused(model: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    change(model, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelFileError) as caught:
        load_model(str(model), "float32", CPU)
    assert str(caught.value) == f"{model} has no tensor {name}, which LlamaForCausalLM needs: {REMEDY}"
    assert not "".join(capfd.readouterr())


@pytest.mark.parametrize("architectures", [["LlamaModel"], None])
def test_no_output_layer_is_random_whatever_the_model_is_called(
    model: Path, architectures: list[str] | None
) -> None:
    change(model, lambda tensors: tensors.pop(HEAD))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    with pytest.raises(ModelFileError, match=f"has no tensor {HEAD}"):
        load_model(str(model), "float32", CPU)


def test_an_embedding_model_needs_no_output_layer(model: Path) -> None:
    change(model, lambda tensors: tensors.pop(HEAD))
    (model / "modules.json").write_text("[]")
    load_model(str(model), "float32", CPU)
    change(model, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ModelFileError, match=f"has no tensor {NORM}"):
        load_model(str(model), "float32", CPU)


def test_a_tensor_of_another_shape_is_refused(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(model, lambda tensors: tensors.update({QUERY: tensors[QUERY][:16].clone()}))
    with pytest.raises(ModelFileError) as caught:
        load_model(str(model), "float32", CPU)
    path, shapes = model / "model.safetensors", "[16, 64] instead of [128, 64]"
    assert str(caught.value) == f"{path} has a tensor {QUERY} that has the shape {shapes}: {REMEDY}"
    assert not "".join(capfd.readouterr())


def test_ranks_refuse_a_tensor_of_another_shape(model: Path) -> None:
    change(model, lambda tensors: tensors.update({QUERY: torch.cat((tensors[QUERY],) * 2)}))
    with pytest.raises(
        ModelFileError, match=rf"{QUERY} that has the shape \[256, 64\] instead of \[128, 64\]"
    ):
        load_slices(model, AutoConfig.from_pretrained(model), torch.float32, 0, 2)


def test_a_weight_of_integers_is_refused(model: Path) -> None:
    change(model, lambda tensors: tensors.update({QUERY: tensors[QUERY].long()}))
    with pytest.raises(ModelFileError, match=f"has a tensor {QUERY} that is I64"):
        load_model(str(model), "float32", CPU)


def test_experts_of_8_bits_without_their_scales_are_refused(tmp_path: Path) -> None:
    make_tiny_model("gpt_oss").save_pretrained(tmp_path)
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    change(tmp_path, lambda tensors: tensors.update({experts: tensors[experts].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelFileError, match=f"has a tensor {experts} that is F8_E4M3"):
        load_model(str(tmp_path), "float32", CPU)


@pytest.mark.parametrize(("name", "value"), [(NORM, math.nan), (QUERY, math.inf)])
def test_weights_that_are_not_finite_are_named(model: Path, name: str, value: float) -> None:
    change(model, lambda tensors: tensors[name].view(-1)[0].fill_(value))
    with pytest.raises(
        UnsupportedModelError, match=r"are not finite: .* damaged, or do not fit torch\.float32"
    ):
        load_model(str(model), "float32", CPU)


def test_weights_of_64_bits_need_another_dtype(model: Path) -> None:
    change(model, lambda tensors: tensors.update({name: each.double() for name, each in tensors.items()}))
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float64"}))
    with pytest.raises(
        UnsupportedModelError, match=r"are torch\.float64: choose --dtype float32 or bfloat16"
    ):
        load_model(str(model), "auto", CPU)
    load_model(str(model), "float32", CPU)


def test_the_dtype_of_a_checkpoint_is_that_of_a_weight(model: Path) -> None:
    change(model, lambda tensors: tensors.update({"a.position_ids": torch.arange(4)}))
    assert Checkpoint(model).dtype == torch.float32


def test_tensors_that_no_parameter_needs_are_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(model, lambda tensors: tensors.update({"other": torch.ones(1)}))
    load_model(str(model), "float32", CPU)
    assert f"{model} does not use 1 tensors, such as other" in caplog.messages


def test_a_missing_shard_is_refused(model: Path) -> None:
    names = list(load_file(model / "model.safetensors"))
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    places = {name: "model-2.safetensors" if name == NORM else "model-1.safetensors" for name in names}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with pytest.raises(ModelFileError, match=f"model-2.safetensors does not exist, and .* tensor {NORM}"):
        load_model(str(model), "float32", CPU)
