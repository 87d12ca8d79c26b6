"""Writes a Llama as a GGUF file, the format of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from quire.benchmarks.peers.sides.protocol import Dtype

KINDS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "w8a8": gguf.GGMLQuantizationType.Q8_0,
    "w4a8": gguf.GGMLQuantizationType.Q4_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}
"""llama.cpp's types of matrices."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of tensors in GGUF, by their names in Hugging Face format, without layers and endings."""


def write_gguf(folder: Path, dtype: Dtype, path: Path) -> None:
    """Write a Llama without a tokenizer, whose prompts are token ids.

    Args:
        folder: the model in Hugging Face format, in one file of float32 tensors.
        dtype: type of matrices; vectors are always in float32, as llama.cpp requires.
        path: the file to write.
    """
    config = json.loads((folder / "config.json").read_text())
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    kind = KINDS[dtype]
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave_halves(tensor, head_dim)
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), tensor)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def gguf_name(name: str) -> str:
    """Return a tensor's name in GGUF: of "model.layers.3.mlp.up_proj.weight" it is "blk.3.ffn_up.weight"."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    layer, _, stem = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[stem]}.weight"


def interleave_halves(weight: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a query or key projection for rotary embeddings of neighbouring pairs.

    transformers rotates row i of a head with row i + head_dim / 2, and llama.cpp row 2i with row 2i + 1.

    Args:
        weight: the projection, [num_heads * head_dim, hidden_size].
    """
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
