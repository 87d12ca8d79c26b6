"""Layers of Llama 4: attention within chunks, and experts whose inputs have weights, not their results."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from transformers.integrations.moe import use_experts_implementation

from quire.engine.model.layers.attention import Attend


def run_chunked_attention(
    layer: Any,
    attend: Attend,
    hidden_states: torch.Tensor,
    position_embeddings: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of ``Llama4TextAttention``.

    Layers with rotated positions attend within chunks. The others attend to all tokens, with a temperature
    that depends on the position; the module takes it from the length of its cache, which a step of several
    sequences does not have.

    Args:
        hidden_states: ``[1, num_tokens, hidden_size]``.
        position_ids: ``[1, num_tokens]``; None means 0, 1, 2 and so on.
    """
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    query, key, value = (
        getattr(layer, name)(hidden_states).unflatten(-1, (-1, layer.head_dim))
        for name in ("q_proj", "k_proj", "v_proj")
    )
    options: dict[str, Any] = {"scaling": layer.scaling}
    if layer.use_rope:
        query, key = apply_rotary_emb(query, key, position_embeddings)
        if hasattr(layer, "qk_norm"):
            query, key = layer.qk_norm(query), layer.qk_norm(key)
    elif layer.attn_temperature_tuning:
        length, device = query.shape[1], query.device
        positions = torch.arange(length, device=device) if position_ids is None else position_ids
        temperatures = _temperatures(layer, device)[(positions + 1) // layer.floor_scale]
        query = (query * temperatures.reshape(1, -1, 1, 1)).to(query.dtype)
    if layer.config.layer_types[layer.layer_idx] == "chunked_attention":
        options |= {"sliding_window": layer.config.attention_chunk_size, "is_chunked": True}
    heads = (each.transpose(1, 2) for each in (query, key, value))
    return layer.o_proj(attend(*heads, attention_mask, **options).flatten(2)), None


def _temperatures(layer: Any, device: torch.device) -> torch.Tensor:
    """Return the temperature by the number of times that ``floor_scale`` tokens have passed.

    It is a table, since the bits of torch's logarithms depend on how many there are.
    """
    if not hasattr(layer, "temperatures"):
        most = layer.config.max_position_embeddings // layer.floor_scale + 1
        values = [1 + layer.attn_scale * math.log1p(each) for each in range(most + 1)]
        layer.temperatures = torch.tensor(values, device=device)
    table: torch.Tensor = layer.temperatures
    return table


@use_experts_implementation(is_transposed=True)
class Experts(torch.nn.Module):
    """The experts of a ``Llama4TextMoe``, with the arguments of transformers' experts interface."""

    def __init__(self, config: Any, original: Any) -> None:
        super().__init__()
        self.num_experts = original.num_experts
        self.gate_up_proj = original.gate_up_proj
        self.down_proj = original.down_proj
        self.act_fn = original.act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the results of each token's experts."""
        total = torch.zeros_like(hidden_states)
        for index, weights in zip(top_k_index.T, top_k_weights.T, strict=True):
            gate, up = (hidden_states[:, None] @ self.gate_up_proj[index]).chunk(2, dim=-1)
            total += ((self.act_fn(gate) * up) @ self.down_proj[index])[:, 0] * weights[:, None]
        return total


def use_experts_interface(model: torch.nn.Module) -> None:
    """Make the experts of a Llama 4 use transformers' experts interface; do nothing for other models."""
    for layer in [each for each in model.modules() if type(each).__name__ == "Llama4TextMoe"]:
        if not isinstance(layer.experts, Experts):
            layer.experts = Experts(model.config.get_text_config(), layer.experts)  # type: ignore[operator, union-attr]
            layer.forward = partial(_run_experts, layer)


def _run_experts(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the shared expert and of each token's experts, and the logits of the router."""
    hidden_states = hidden_states.reshape(-1, layer.hidden_dim)
    scores, logits = layer.router(hidden_states)
    chosen = torch.topk(logits, layer.top_k, dim=1).indices.sort(dim=1).values
    weights = scores.gather(1, chosen)
    # A token's inputs of its experts differ, so each is a row with one expert.
    rows = (hidden_states[:, None] * weights[..., None]).flatten(0, 1)
    results = layer.experts(rows, chosen.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
    total = layer.shared_expert(hidden_states)
    for each in results.unflatten(0, chosen.shape).unbind(1):
        total = total + each
    return total, logits
