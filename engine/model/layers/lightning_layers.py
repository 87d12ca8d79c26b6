"""Lightning attention, as in MiniMax-Text-01, whose states are kept in KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.engine.model.layers.state_layers import kept_weights
from quire.kernels.cpu import rows
from quire.kernels.cpu.linear_attention import Decay, LinearAttention
from quire.kernels.cpu.rows import Activation, Gate


def run_lightning_attention(
    layer: Any, attend: Callable[..., torch.Tensor], hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Run a layer like ``MiniMaxLightningAttention``; see ``run_mamba``."""
    by_head = layer.act_fn(layer.qkv_proj(hidden_states)).float()
    parts = by_head.unflatten(-1, (layer.num_attention_heads, 3, layer.head_dim)).transpose(2, 3)
    inputs, no_steps = parts.flatten(2), by_head[..., :0]
    output = attend(inputs, no_steps, inputs, recurrence=kept_weights(layer, _weights))
    norm, gate = layer.norm, Gate(layer.output_gate(hidden_states), Activation.SIGMOID)
    output = output.to(hidden_states.dtype)
    return layer.out_proj(rows.norm(output, norm.kind, norm.weight32, None, norm.epsilon, gate=gate)), None


def _weights(layer: Any) -> LinearAttention:
    rates = -layer.slope_rate.float().flatten()
    num_heads = layer.num_attention_heads
    return LinearAttention(
        taps=None,
        conv_bias=None,
        decay=Decay.FIXED,
        rates=rates.contiguous(),
        step_bias=torch.zeros(num_heads, 1),
        skip=torch.zeros(num_heads),
        num_key_heads=num_heads,
        key_dim=layer.head_dim,
        row_size=layer.head_dim,
        most_replaced=0,
    )
