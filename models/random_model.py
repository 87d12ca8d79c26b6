"""Random models of many architectures, with which tests and benchmarks run real code without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_COMMON = {
    "vocab_size": 320,
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
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 32}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", _GROUPED),
    "smollm3": ("SmolLM3Config", _GROUPED),
    "phi3": ("Phi3Config", {**_GROUPED, "intermediate_size": 128}),
    "granite": ("GraniteConfig", {**_GROUPED, "residual_multiplier": 0.5, "logits_scaling": 0.25}),
    "arcee": ("ArceeConfig", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 24}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "sliding_window": 24, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", {**_GROUPED, "sliding_window": 24, "num_hidden_layers": 7}),
    "gpt2": ("GPT2Config", _COMMON),
    "gpt_neox": ("GPTNeoXConfig", _COMMON),
    "opt": ("OPTConfig", {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_oss": ("GptOssConfig", {**_GROUPED, "sliding_window": 24, "num_local_experts": 4}),
}
"""The configuration class and the values of a tiny model, for each architecture."""


def make_random_model(architecture: str, folder: Path, *, seed: int = 7, **overrides: Any) -> Path:
    """Save a random model whose best logits lead so clearly that rounding cannot change greedy choices.

    Args:
        architecture: a key of ``ARCHITECTURES``.
        folder: folder to save the model to, in Hugging Face format, with a byte-level tokenizer.
        seed: seed of the random weights.
        overrides: configuration values that replace the tiny ones.
    """
    class_name, values = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    config = getattr(transformers, class_name)(**{**values, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 0.35 if "embed" in name else 0.15)
    # With widely spread logits the best token leads the second by far more than float32 rounding errors.
    model.get_output_embeddings().weight.data.normal_(0.0, 2.0)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, after <bos> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
    )
