"""Makes random Llamas, saves them once in Hugging Face format, and finds them there later."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CACHE = Path("~/.cache/quire/benchmarks").expanduser()
"""Folder of the files that benchmarks reuse in later runs."""
SIZES = {
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
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
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Sizes of the models, by their number of parameters."""


def random_llama(size: str, folder: Path, *, max_length: int = 4096) -> Path:
    """Return the folder of a random Llama with a byte tokenizer, in float32; make it if it does not exist.

    Args:
        size: one of ``SIZES``.
        folder: folder of all models.
        max_length: most tokens of a sequence, unless the size has its own.
    """
    path = folder / "models" / f"{size}-float32-{max_length}"
    if not path.exists():
        torch.manual_seed(0)
        values = {"max_position_embeddings": max_length, **SIZES[size]}
        config = LlamaConfig(**values, bos_token_id=0, eos_token_id=1, pad_token_id=0)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        byte_tokenizer().save_pretrained(unfinished)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(unfinished)
        unfinished.rename(path)
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, after <bos> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
