"""Tiny random models of transformers, and the tokens that it generates with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from quire.benchmarks.harness.random_llamas import byte_tokenizer

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
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# A quarter of DeepSeek's sizes.
_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
# The inputs of a convolution fill the keys and values of two layers, and a part of the second.
_CONVOLUTIONS = {
    **_COMMON,
    "hidden_size": 96,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
# A state takes the place of several layers' keys and values.
_STATES = {
    **_COMMON,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
_SCANS = {**_COMMON, "intermediate_size": 128, "state_size": 8}
# Each head of keys belongs to two heads of values; a quarter of each head is rotated.
_DELTA_NETS = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_KIMI_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 48}

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
    "lfm2": ("Lfm2Config", {**_CONVOLUTIONS, "conv_bias": True}),
    "lfm2_moe": ("Lfm2MoeConfig", {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1}),
    "lfm3": (
        "Lfm3Config",
        {
            **_CONVOLUTIONS,
            "head_dim": 24,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
        },
    ),
    "bamba": ("BambaConfig", {**_STATES, "attn_layer_indices": [1]}),
    "mamba": ("MambaConfig", {**_SCANS, "use_bias": True}),
    "falcon_mamba": ("FalconMambaConfig", _SCANS),
    "mamba2": ("Mamba2Config", {**_COMMON, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "jamba": (
        "JambaConfig",
        {
            **_STATES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 4,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_STATES,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "adapter_rank": 8,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "num_mem_blocks": 1,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_STATES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "layer_types": ["mamba", "attention", "mamba"],
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_STATES,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_in_multiplier": 0.5,
            "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **_GROUPED,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_STATES,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "head_dim": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA_NETS, **_SHARED_EXPERT, "mlp_only_layers": [1]}),
    "qwen3_5_text": ("Qwen3_5TextConfig", _DELTA_NETS),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_DELTA_NETS, **_SHARED_EXPERT}),
    "olmo_hybrid": ("OlmoHybridConfig", _DELTA_NETS),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            **_KIMI_DELTA,
            **_EXPERTS,
            "q_lora_rank": None,
            "mlp_layer_types": ["dense", "sparse"] * 2,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **_LATENT,
            **_KIMI_DELTA,
            **_EXPERTS,
            **_GROUPS,
            "head_dim": 16,
            "num_local_experts": 8,
            "kda_lower_bound": -5.0,
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "block_size": 16,
            "linear_attn_beta_factor": 0.7,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "gpt2": ("GPT2Config", _COMMON),
    "gpt_neox": ("GPTNeoXConfig", _COMMON),
    "opt": ("OPTConfig", {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "first_k_dense_replace": 3}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_LATENT, "qk_nope_head_dim": 48, "v_head_dim": 64, "mlp_layer_types": ["dense"] * 3},
    ),
    "ministral3": ("Ministral3Config", _GROUPED),
    "minicpm3": (
        "MiniCPM3Config",
        {**_LATENT, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "youtu": ("YoutuConfig", _LATENT),
    "gpt_oss": ("GptOssConfig", {**_GROUPED, "sliding_window": 24, "num_local_experts": 4}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 5}),
    "phimoe": (
        "PhimoeConfig",
        {**_COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 5},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_GROUPED, **_SHARED_EXPERT}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, **_EXPERTS}),
    "glm4_moe": ("Glm4MoeConfig", {**_GROUPED, **_EXPERTS, **_GROUPS}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, **_EXPERTS, **_GROUPS}),
}
"""The configuration class and the values of a tiny model, for each architecture."""


def make_random_model(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Save a random model whose best logits lead so clearly that rounding cannot change greedy choices.

    Args:
        architecture: a key of ``ARCHITECTURES``.
        folder: folder to save the model to, in Hugging Face format, with a byte-level tokenizer.
        overrides: configuration values that replace the tiny ones.
    """
    class_name, values = ARCHITECTURES[architecture]
    torch.manual_seed(7)
    config = getattr(transformers, class_name)(**{**values, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0.0, 0.35 if "embed" in name else 0.15)
    # With widely spread logits the best token leads the second by far more than float32 rounding errors.
    model.get_output_embeddings().weight.data.normal_(0.0, 2.0)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@cache
def load_reference(folder: Path) -> Any:
    """Return the model of a folder in float32, as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def generate_greedy(model: Any, prompt: list[int], num_new: int, **options: Any) -> list[int]:
    """Return the next ``num_new`` greedy tokens of transformers' generate; none of them ends the answer."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        eos_token_id=None,
        **options,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def best_tokens(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return transformers' best token at each place of an answer, after the answer's own tokens before it.

    If these are the answer's tokens, it is the greedy one. All places take one pass of the model, and
    ``generate_greedy`` takes one for each.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
    best: list[int] = logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return best


def search_beams(
    model: Any, prompt: list[int], width: int, **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Return the answers of transformers' beam search, the best first, and their scores."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    eos = model.generation_config.eos_token_id
    rows = output.sequences[:, len(prompt) :].tolist()
    answers = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    return answers, output.sequences_scores.tolist()
