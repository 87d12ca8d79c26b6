"""The models: random Llamas, saved in float32 in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.models.random_model import byte_tokenizer

SIZES = {
    "7m": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "100m": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
"""Sizes of the models, by their number of parameters."""


def make_random_llama(folder: Path, sizes: dict[str, int]) -> Path:
    """Save a random Llama, unless the folder holds it already; return the folder."""
    if not folder.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            **{"max_position_embeddings": 4096, **sizes}, bos_token_id=0, eos_token_id=1, pad_token_id=0
        )
        unfinished = folder.with_suffix(".unfinished")
        byte_tokenizer().save_pretrained(unfinished)
        LlamaForCausalLM(config).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder
