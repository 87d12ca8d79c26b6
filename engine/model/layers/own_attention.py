"""Lets layers with code of their own use transformers' attention interface: attention and short convolutions.

For each of these models a function here replaces the part of a layer that leads from its queries, keys and
values to its output. Everything else stays the model's own, and so do the weights. For eager attention, the
layer runs its original code, with which the check at load time compares the replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers import attention
from quire.engine.model.layers.attention import Attend
from quire.engine.model.layers.convolution_layers import run_short_convolution
from quire.engine.model.layers.delta_layers import run_delta_net
from quire.engine.model.layers.lightning_layers import run_lightning_attention
from quire.engine.model.layers.llama4_layers import run_chunked_attention
from quire.engine.model.layers.mamba_layers import run_mamba, run_selective_scan


class _Replacement(NamedTuple):
    """Which method of which class of attention layers is replaced, and by what."""

    layer_class: str
    method: str
    function: Callable[..., Any]
    needs_mask: bool = False
    """Whether the model changes its mask, so that it needs one, before a layer gets it."""
    needs_positions: bool = False
    """Whether the function gets ``position_ids``, which the model does not give to this layer."""


def implementation_at_load(config: PreTrainedConfig) -> str:
    """Return the attention implementation that a model must be made with."""
    return "eager" if config.get_text_config().model_type in _REPLACEMENTS else attention.IMPLEMENTATION


def kinds_of_layers(config: Any) -> frozenset[str]:
    """Return the kinds of a model's layers that a function here replaces, and not only their attention."""
    replacement = _REPLACEMENTS.get(config.model_type)
    kinds = frozenset[str]() if replacement is None else _KINDS.get(replacement.function, frozenset())
    # Some models of granitemoehybrid have attention only.
    return kinds.intersection(getattr(config, "layer_types", None) or ())


def connect(model: PreTrainedModel) -> None:
    """Connect a model's own attention to the attention interface, if it does not use the interface itself.

    Raises:
        UnsupportedModelError: this variant of its attention is not one that paged attention computes.
    """
    config = model.config.get_text_config()
    replacement = _REPLACEMENTS.get(config.model_type)
    if replacement is None:
        return
    _check_variant(config, model.dtype)
    step: dict[str, object] = {}
    positions: dict[str, object] = {}

    def keep(_: object, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        step["paged_step"] = options.get("paged_step")
        positions["position_ids"] = options.get("position_ids")
        if replacement.needs_mask and config._attn_implementation != "eager":
            options = {**options, "attention_mask": torch.zeros((1, 1, 1, 1), dtype=torch.bool)}
        return inputs, options

    model.register_forward_pre_hook(keep, with_kwargs=True)
    layers: list[Any] = [each for each in model.modules() if type(each).__name__ == replacement.layer_class]
    for layer in layers:
        original = getattr(layer, replacement.method)
        added = positions if replacement.needs_positions else {}
        run = partial(_run, config, step, added, layer, original, replacement.function)
        setattr(layer, replacement.method, run)
    # transformers looks for the interface in the source of the model's class, where it is not.
    model._can_set_attn_implementation = lambda: True
    model.set_attn_implementation(attention.IMPLEMENTATION)


def _check_variant(config: Any, dtype: torch.dtype) -> None:
    name = config.model_type
    if name == "falcon" and config.alibi:
        raise UnsupportedModelError(
            "falcon: with alibi it rounds position biases to bfloat16, depending on the distance from the "
            "first token; paged attention does not"
        )
    if name == "big_bird" and config.attention_type != "original_full":
        raise UnsupportedModelError(
            f"big_bird: with attention_type {config.attention_type!r} a token does not see all earlier ones; "
            "choose 'original_full'"
        )
    if name == "bloom" and dtype != torch.float32:
        raise UnsupportedModelError(
            "bloom: in 16 bits it rounds position biases, depending on the distance from the first token; "
            "paged attention does not: choose the dtype float32"
        )


def _run(
    config: PreTrainedConfig,
    step: dict[str, object],
    added: dict[str, object],
    layer: torch.nn.Module,
    original: Callable[..., Any],
    function: Callable[..., Any],
    *inputs: Any,
    **options: Any,
) -> Any:
    """Run a replaced method, or the original one for eager attention."""
    implementation = config._attn_implementation
    if implementation == "eager":
        return original(*inputs, **options)
    interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[implementation]
    if "paged_step" in options:
        step = {"paged_step": options["paged_step"]}

    def attend(query: Any, key: Any, value: Any, mask: Any = None, **arguments: Any) -> torch.Tensor:
        # Some models rotate queries and keys in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        output: torch.Tensor = interface(layer, query, key, value, mask, **arguments, **step)[0]
        return output

    return function(layer, attend, *inputs, **{**added, **options})


def _heads(layer: Any, hidden_states: torch.Tensor, num_heads: int, names: str) -> list[torch.Tensor]:
    """Return the outputs of linear layers by heads, each ``[1, num_heads, num_tokens, head_dim]``."""
    return [
        getattr(layer, name)(hidden_states).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for name in names.split()
    ]


def _from_heads(_: Any, attend: Attend, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    return attend(query, key, value, mask).transpose(1, 2), None


def _gpt(_: Any, attend: Attend, query: Any, key: Any, value: Any, *__: Any) -> list[Any]:
    return [attend(query, key.transpose(2, 3), value).transpose(1, 2)]


def _gpt_neo(layer: Any, attend: Attend, query: Any, key: Any, value: Any, *_: Any) -> Any:
    window = layer.config.window_size if layer.attention_type == "local" else None
    return attend(query, key, value, scaling=1.0, sliding_window=window).transpose(1, 2), None


def _bert(layer: Any, attend: Attend, hidden_states: Any, attention_mask: Any, *_: Any, **__: Any) -> Any:
    query, key, value = _heads(layer, hidden_states, layer.num_attention_heads, "query key value")
    return attend(query, key, value, attention_mask).flatten(2), None


def _git(layer: Any, attend: Attend, hidden_states: Any, *_: Any, **__: Any) -> Any:
    # Its mask also lets the tokens of an image see each other, and a prompt without images has none.
    return _bert(layer, attend, hidden_states, None)


def _roformer(
    layer: Any, attend: Attend, hidden_states: Any, attention_mask: Any, sinusoidal_pos: Any, **_: Any
) -> Any:
    query, key, value = _heads(layer, hidden_states, layer.num_attention_heads, "query key value")
    rotated = (query, key, value) if layer.rotary_value else (query, key)
    query, key, value = (*layer.apply_rotary_position_embeddings(sinusoidal_pos, *rotated), value)[:3]
    return attend(query, key, value, attention_mask).flatten(2), None


def _xglm(layer: Any, attend: Attend, hidden_states: torch.Tensor, attention_mask: Any, **_: Any) -> Any:
    query, key, value = _heads(layer, hidden_states, layer.num_heads, "q_proj k_proj v_proj")
    return layer.out_proj(attend(query, key, value, attention_mask).flatten(2)), None


def _falcon(
    layer: Any, attend: Attend, hidden_states: Any, attention_mask: Any, position_embeddings: Any, **_: Any
) -> Any:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, key, value = (
        each.transpose(1, 2) for each in layer._split_heads(layer.query_key_value(hidden_states))
    )
    # A group of query heads has its key and value once for each query head.
    copies = key.shape[1] // layer.num_kv_heads
    query, key = apply_rotary_pos_emb(query, key[:, ::copies], *position_embeddings)
    return layer.dense(attend(query, key, value[:, ::copies], attention_mask).flatten(2)), None


def _bloom(
    layer: Any, attend: Attend, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, **_: Any
) -> Any:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    query, key, value = layer._reshape(layer.query_key_value(hidden_states))
    slopes = build_alibi_tensor(alibi.new_ones(1, 2), layer.num_heads, torch.float32)[:, 0, 1]
    output = attend(query, key, value, attention_mask, alibi_slopes=slopes)
    return residual + layer.dense(output.flatten(2)), None


def _mpt(layer: Any, attend: Attend, hidden_states: Any, position_bias: Any, **_: Any) -> Any:
    mixed = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        mixed = mixed.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    query, key, value = (
        each.transpose(1, 2) for each in mixed.unflatten(-1, (3, layer.n_heads, -1)).unbind(2)
    )
    # The last bias belongs to a distance of 0, the one before it to a distance of 1.
    options = {"scaling": layer.softmax_scale, "alibi_slopes": -position_bias[:, 0, -2]}
    return layer.out_proj(attend(query, key, value, **options).flatten(2)), None


_REPLACEMENTS = {
    "bailing_hybrid": _Replacement("BailingHybridDeltaAttention", "forward", run_delta_net),
    "bamba": _Replacement("BambaMixer", "forward", run_mamba),
    "big_bird": _Replacement("BigBirdSelfAttention", "forward", _bert),
    "bloom": _Replacement("BloomAttention", "forward", _bloom),
    "codegen": _Replacement("CodeGenAttention", "_attn", _from_heads),
    "falcon": _Replacement("FalconAttention", "forward", _falcon),
    "falcon_h1": _Replacement("FalconH1Mixer", "forward", run_mamba),
    "falcon_mamba": _Replacement("FalconMambaMixer", "forward", run_selective_scan),
    "git": _Replacement("GitSelfAttention", "forward", _git),
    "gpt_neo": _Replacement("GPTNeoSelfAttention", "_attn", _gpt_neo),
    "gpt_neox_japanese": _Replacement("GPTNeoXJapaneseAttention", "_attn", _from_heads),
    "gptj": _Replacement("GPTJAttention", "_attn", _from_heads),
    "granitemoehybrid": _Replacement("GraniteMoeHybridMambaLayer", "forward", run_mamba),
    "jamba": _Replacement("JambaMambaMixer", "forward", run_selective_scan),
    "kimi_linear": _Replacement("KimiLinearDeltaAttention", "forward", run_delta_net),
    "lfm2": _Replacement("Lfm2ShortConv", "forward", run_short_convolution),
    "lfm2_moe": _Replacement("Lfm2MoeShortConv", "forward", run_short_convolution),
    "lfm3": _Replacement("Lfm3ShortConv", "forward", run_short_convolution),
    "llama4_text": _Replacement(
        "Llama4TextAttention", "forward", run_chunked_attention, needs_positions=True
    ),
    "mamba": _Replacement("MambaMixer", "forward", run_selective_scan),
    "mamba2": _Replacement("Mamba2Mixer", "forward", run_mamba),
    "megatron-bert": _Replacement("MegatronBertSelfAttention", "forward", _bert),
    "minimax": _Replacement("MiniMaxLightningAttention", "forward", run_lightning_attention),
    "mpt": _Replacement("MptAttention", "forward", _mpt, needs_mask=True),
    "mvp": _Replacement("MvpAttention", "forward", _xglm),
    "nemotron_h": _Replacement("NemotronHMamba2Mixer", "forward", run_mamba),
    "olmo_hybrid": _Replacement("OlmoHybridGatedDeltaNet", "forward", run_delta_net),
    "openai-gpt": _Replacement("Attention", "_attn", _gpt),
    "qwen3_5_moe_text": _Replacement("Qwen3_5MoeGatedDeltaNet", "forward", run_delta_net),
    "qwen3_5_text": _Replacement("Qwen3_5GatedDeltaNet", "forward", run_delta_net),
    "qwen3_next": _Replacement("Qwen3NextGatedDeltaNet", "forward", run_delta_net),
    "rembert": _Replacement("RemBertSelfAttention", "forward", _bert),
    "roformer": _Replacement("RoFormerSelfAttention", "forward", _roformer),
    "xglm": _Replacement("XGLMAttention", "forward", _xglm),
    "zamba2": _Replacement("Zamba2MambaMixer", "forward", run_mamba),
}
"""The models, by the type in their configuration."""
_KINDS: dict[Callable[..., Any], frozenset[str]] = {
    run_short_convolution: frozenset({"conv"}),
    run_mamba: frozenset({"linear_attention", "hybrid"}),
    run_selective_scan: frozenset({"linear_attention"}),
    run_chunked_attention: frozenset({"chunked_attention"}),
    run_delta_net: frozenset({"linear_attention"}),
    run_lightning_attention: frozenset({"linear_attention"}),
}
"""What transformers calls the layers that a function replaces."""
