"""Two models have one digest only if every weight is equal; nothing that the digest would miss is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from quire.engine.weights.loader import load_model

CPU = torch.device("cpu")


def copy_with_one_byte_changed(model: Path, target: Path, position: int) -> Path:
    """Copy a model and flip a bit of one byte of its weights, counted from their end."""
    shutil.copytree(model, target)
    weights = target / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-position] ^= 1
    weights.write_bytes(data)
    return target


@pytest.mark.parametrize("position", [1, 1000, 5000, 12_345])
def test_one_changed_bit_is_another_model(
    tiny_model: Callable[[str], Path], tmp_path: Path, position: int
) -> None:
    model = tiny_model("llama")
    other = copy_with_one_byte_changed(model, tmp_path / "other", position)
    assert load_model(str(model), "float32", CPU).digest != load_model(str(other), "float32", CPU).digest


def test_the_configuration_belongs_to_the_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    shutil.copytree(model, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    path.write_text(json.dumps(config))
    digests = {load_model(str(each), "float32", CPU).digest for each in (model, tmp_path / "other")}
    assert len(digests) == 2


def test_the_layout_of_the_files_does_not_matter(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    shutil.copytree(model, tmp_path / "sharded")
    tensors = load_file(tmp_path / "sharded" / "model.safetensors")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    names = sorted(tensors)
    shards: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / "sharded" / shard, {"format": "pt"})
        shards |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": shards}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    digests = {load_model(str(each), "float32", CPU).digest for each in (model, tmp_path / "sharded")}
    assert len(digests) == 1


def test_weights_in_another_format_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "pickled")
    weights = tmp_path / "pickled" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with pytest.raises(OSError, match=r"no \*\.safetensors, the only format of weights that quire reads"):
        load_model(str(tmp_path / "pickled"), "float32", CPU)


def test_an_adapter_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "adapted")
    (tmp_path / "adapted" / "adapter_config.json").write_text("{}")
    with pytest.raises(OSError, match="merge it into its model"):
        load_model(str(tmp_path / "adapted"), "float32", CPU)


def test_a_model_without_an_output_layer_has_one_digest(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    AutoModel.from_pretrained(tiny_model("qwen3")).save_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    digests = {load_model(str(tmp_path), "float32", CPU).digest for _ in range(2)}
    assert len(digests) == 1
