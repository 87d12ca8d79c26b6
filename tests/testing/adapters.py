"""The logprobs of a model with an adapter in PEFT's format by the plain formula."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


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
