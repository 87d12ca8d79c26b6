"""Writes models in Hugging Face format as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""GGUF's names of architectures, where they differ from transformers'."""
Kinds = Callable[[str], gguf.GGMLQuantizationType]


def write_gguf(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType | Kinds = gguf.GGMLQuantizationType.F32,
    *,
    settings: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    pre: str = "gpt-2",
) -> Path:
    """Write a model and its byte-level tokenizer.

    Args:
        folder: a model in Hugging Face format, with ``tokenizer.json``.
        path: the file to write.
        kind: the type of all matrices, or a function from a tensor's name to its type.
        settings: more settings of the architecture, without its name; None leaves one out.
        extra: more tensors by their names in the file.
        pre: name of the pre-tokenizer.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_settings(config), **(settings or {})}.items():
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{key}", value)
    _add_tokenizer(writer, folder, config, pre)
    for name, tensor in _tensors(model, architecture).items():
        _add(writer, name, tensor, kind(name) if callable(kind) else kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(config: Any) -> dict[str, Any]:
    values = config.to_dict()
    rope = values["rope_parameters"]
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    window = values.get("sliding_window") if "gemma" in config.model_type else None
    return {
        "context_length": values["max_position_embeddings"],
        "embedding_length": values["hidden_size"],
        "block_count": values["num_hidden_layers"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": values["num_attention_heads"],
        "attention.head_count_kv": values["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(values["rms_norm_eps"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": window,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "rope.dimension_count": head_dim,
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": values.get("num_experts_per_tok"),
        "expert_feed_forward_length": values.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": values.get("shared_expert_intermediate_size"),
        "attn_logit_softcapping": values.get("attn_logit_softcapping"),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: Any, pre: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"])
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    names = {**{number: token for token, number in vocabulary.items()}, **special}
    numbers = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in numbers])
    kinds = [gguf.TokenType.UNUSED if n not in names else gguf.TokenType.NORMAL for n in numbers]
    writer.add_token_types([gguf.TokenType.CONTROL if n in special else kinds[n] for n in numbers])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    options = json.loads((folder / "tokenizer_config.json").read_text())
    if template := options.get("chat_template"):
        writer.add_chat_template(template)


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors as they lie in a file, by their names there."""
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        model.config.num_hidden_layers,
    )
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for parameter, values in model.named_parameters():
        tensor = values.detach().numpy()
        stem, ending = (
            parameter.rsplit(".", 1) if parameter.endswith(("weight", "bias")) else (parameter, "weight")
        )
        if parameter.endswith("experts.gate_up_proj"):
            block = names.get_name(parameter.replace("gate_up_proj", "down_proj"))
            for part, half in zip(("gate", "up"), np.split(tensor, 2, axis=1), strict=True):
                tensors[f"{str(block).replace('down', part)}.weight"] = np.ascontiguousarray(half)
            continue
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            tensor = _interleave(tensor, model.config.head_dim)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            tensor = tensor + 1
        if stem.endswith("shared_expert_gate"):
            tensor = tensor[0]
        tensors[f"{names.get_name(stem)}.{ending}"] = tensor
    return tensors


def _interleave(tensor: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Put the rows of a head that are rotated together, i and i + head_dim / 2, beside each other."""
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def _add(
    writer: gguf.GGUFWriter, name: str, tensor: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType
) -> None:
    if tensor.ndim == 1 or "ffn_gate_inp" in name:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, encode(tensor, kind), raw_dtype=kind)


def encode(tensor: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return a tensor in a type of GGUF; the K types, which gguf cannot write, get random blocks."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(tensor, kind)
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(tensor.size)
    blocks = random.integers(0, 256, (*tensor.shape[:-1], tensor.shape[-1] // per_block, num_bytes), np.uint8)
    scales = {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [num_bytes - 2], "Q3_K": [num_bytes - 2]}
    for first in scales.get(kind.name, [num_bytes - 4, num_bytes - 2]):
        halves = random.uniform(1e-4, 2e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., first : first + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)
