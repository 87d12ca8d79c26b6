"""Writes a model with weights in 8 bits in the format compressed-tensors, which vLLM reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.benchmarks.peers.sides.protocol import Setup

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""One scale for each output of a weight, and one for each token of its inputs; not for the output layer."""


def checkpoint_for(setup: Setup) -> Path:
    """Return the checkpoint that vLLM loads; write it beside the model if it does not exist.

    Raises:
        ValueError: vLLM is not measured with this type of weights.
    """
    folder = Path(setup.model)
    if setup.dtype in ("w4a8", "int4"):
        raise ValueError("it is not measured with weights in 4 bits")
    if setup.dtype != "w8a8":
        return folder
    path = folder.with_name(f"{folder.name}-w8a8")
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        shutil.copytree(
            folder, unfinished, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
        )
        config = json.loads((folder / "config.json").read_text())
        config |= {"quantization_config": QUANTIZATION, "dtype": "bfloat16"}
        (unfinished / "config.json").write_text(json.dumps(config))
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            tensors |= quantized(name, tensor) if "_proj." in name else {name: tensor.bfloat16()}
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        unfinished.rename(path)
    return path


def quantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that replace a weight ``[out_features, in_features]``."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    integers = (weight / scales).round().clamp(-127, 127).to(torch.int8)
    return {name: integers, f"{name}_scale": scales.bfloat16()}
