"""Makes random adapters in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

ALL_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj", "c_attn", "c_proj", "c_fc", "out_proj", "fc1", "fc2"),
)
"""Names of the linear layers that may have an adapter, in several architectures."""


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 8,
    targets: tuple[str, ...] = ALL_TARGETS,
    size: float = 0.1,
    **config: Any,
) -> Path:
    """Save a random adapter of a model's linear layers that have these names; return its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    module = AutoModelForCausalLM.from_pretrained(model)
    for name, layer in module.named_modules():
        if name.rpartition(".")[2] in targets:
            weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
            out_features, in_features = weight.shape
            prefix = f"base_model.model.{name}.lora_"
            a, b = (rank, in_features), (out_features, rank)
            tensors[f"{prefix}A.weight"] = torch.randn(a, generator=generator) * in_features**-0.5
            tensors[f"{prefix}B.weight"] = torch.randn(b, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values), "utf-8")
    return folder
