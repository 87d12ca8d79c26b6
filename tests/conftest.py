"""Tiny random models of many architectures, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VOCAB_SIZE = 320
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 32}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 24}),
    "gemma2": ("Gemma2Config", {**GROUPED, "sliding_window": 24, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, "sliding_window": 24, "num_hidden_layers": 7}),
    "gpt_neox": ("GPTNeoXConfig", COMMON),
    "opt": ("OPTConfig", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_oss": ("GptOssConfig", {**GROUPED, "sliding_window": 24, "num_local_experts": 4}),
}


def make_model(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Save a random model whose greedy choices are clear, so that rounding cannot flip them."""
    import torch
    import transformers

    config_class, values = ARCHITECTURES[architecture]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**values, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 0.35 if "embed" in name else 0.15)
    model.get_output_embeddings().weight.data.normal_(0.0, 2.0)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from architecture name to the folder of its tiny random model."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_model(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return get
