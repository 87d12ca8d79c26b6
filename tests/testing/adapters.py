"""Random adapters in PEFT's format, and the logprobs of a model with one by the plain formula."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

ALL_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj", "c_attn", "c_proj", "c_fc", "out_proj", "fc1", "fc2"),
)


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
    """Save a random adapter of a model's linear layers that have these names."""
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


def logprobs_by_formula(model: Path, adapter: Path | None, token_ids: list[int]) -> torch.Tensor:
    """Return float32 ``[num_tokens, vocab_size]``; each linear layer gives ``W x + scale * B (A x)``."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode(), _adapted(module, adapter):
        logits: torch.Tensor = module(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)


@contextmanager
def _adapted(module: torch.nn.Module, adapter: Path | None) -> Iterator[None]:
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
        for key, a in tensors.items():
            if key.endswith("lora_A.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[key.replace("lora_A", "lora_B")]
                scale = config["lora_alpha"] / (len(a) ** (0.5 if config.get("use_rslora") else 1))
                module.get_submodule(name).register_forward_hook(
                    lambda _, inputs, output, a=a, b=b, scale=scale: (
                        output + scale * ((inputs[0] @ a.T) @ b.T)
                    )
                )
    yield
