"""Sizes of tiny models, and the kinds of layers that they need so that a survey of them is honest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    # Other names of these values in some architectures.
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 96,
    "d_model": 64,
    "d_inner": 96,
    "d_head": 16,
    "n_heads": 4,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64,
    "rotary_dim": 16,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "num_decoder_attention_heads": 4,
    "max_seq_len": 512,
    "is_decoder": True,
    "is_encoder_decoder": False,
    # Experts.
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention. As in most published models, keys are larger than values.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    # Layers with state.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "n_mamba_heads": 4,
}
"""Values of a configuration. An architecture ignores those that it does not have.

``num_hidden_layers`` is the fewest layers: an architecture has at least one of each of its kinds.
"""

SPEED_SIZES: Mapping[str, Any] = {
    **SIZES,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "shared_intermediate_size": 512,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_heads": 8,
    "linear_head_dim": 64,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
}
"""Values of larger models, with which most of a prompt's time is arithmetic."""

PEER_SIZES: Mapping[str, Any] = {
    **SPEED_SIZES,
    "num_hidden_layers": 8,
    "max_position_embeddings": 1024,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
"""Values of models for a comparison with other engines.

Their steps have fixed costs, so there are more layers. vLLM's kernel has only published sizes of latents.
"""

PART_SIZES: Mapping[str, Any] = {
    **SIZES,
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "image_size": 32,
    "patch_size": 16,
}
"""Values of the parts of a model that read images or audio."""

NUM_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
)
"""Names of the number of layers."""

WINDOW = 48
"""Tokens of a window: more than the prompts of the check at load have, and fewer than those of the survey."""

KINDS: Mapping[str, str] = {
    "lfm2": "conv full_attention",
    "lfm2_moe": "conv full_attention",
    "granitemoehybrid": "linear_attention full_attention",
    "bamba": "linear_attention full_attention",
    "ministral": "sliding_attention full_attention",
}
"""Kinds of layers of published models where those of the default configuration are fewer."""

_VISION_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")
_VISION = {"image_size": 32, "num_hidden_layers": 2, **{key: SIZES[key] for key in _VISION_SIZES}}
_FULL_HEADS = {"num_key_value_heads": 4}
_PER_LAYER_INPUTS = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 16}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            *("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk1", "axk2", "minicpm3", "youtu"),
            *("glm_moe_dsa", "dots3_note_text", "bailing_hybrid"),
        ),
        _FULL_HEADS,
    ),
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "dbrx": {
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        **_FULL_HEADS,
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 32 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")},
        **{f"swa_{name}": 16 for name in ("qk_nope_head_dim", "v_head_dim")},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "falcon_mamba": {"intermediate_size": 128},
    "gemma3n_text": {
        **_PER_LAYER_INPUTS,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**_PER_LAYER_INPUTS, "global_head_dim": 32},
    "gemma4_unified_text": {**_PER_LAYER_INPUTS, "global_head_dim": 32},
    "git": {"vision_config": _VISION},
    "glm4_moe_lite": {**_FULL_HEADS, "v_head_dim": 32},
    "llama4_text": {
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": WINDOW,
        "floor_scale": 16,
    },
    "gpt_neo": {"num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {**_FULL_HEADS, "q_lora_rank": None},
    # vLLM always ties the output layer to the embeddings, as they are in the published models.
    "lfm2": {"tie_word_embeddings": True},
    "lfm2_moe": {"num_dense_layers": 1},
    "longcat_flash": {**_FULL_HEADS, "moe_topk": 2, "zero_expert_num": 2},
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "n_groups": 1, "state_size": 16},
    "mimo_v2_flash": {"v_head_dim": 8},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        "moe_shared_expert_intermediate_size": 32,
    },
    "phi4_multimodal": {
        "vision_config": _VISION,
        "audio_config": {
            **_VISION,
            "num_blocks": 2,
            **dict.fromkeys(
                ("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 64
            ),
        },
    },
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1,
        "hc_lowrank": 16,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "attention_head_size": 16},
    "xlstm": {"num_heads": 4, "hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "use_mamba_kernels": False},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""Values that only this architecture needs."""

_ASSISTANT = "drafts tokens for another model, and reads its keys and values"
_AUDIO = "generates or reads audio, and no text continues its prompts"
UNTRIED: Mapping[str, str] = {
    "blt": "reads bytes in patches, which a second model chooses",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "gemma3n": "its image part needs the package timm; its text model is `gemma3n_text`",
    "moshi": _AUDIO,
    "moss_transcribe_diarize": _AUDIO,
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
    "whisper": _AUDIO,
}
"""Architectures without a tiny model, and why."""

REASONS: Mapping[str, str] = {
    "no layer that calls|cannot load|did not pass paged_step": (
        "attention does not go through transformers' attention interface, or drops its arguments"
    ),
    "keep no paged KV cache": (
        "layers keep state other than keys and values (linear, state-space, indexed or compressed attention)"
    ),
    "paged attention would see other tokens|masks": "attention masks are not a causal window of the layer",
}
"""What a user needs to know about a refusal, by a pattern of its message."""
