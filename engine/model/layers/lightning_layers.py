"""Lightning attention, as in MiniMax-Text-01, whose states are kept in KV blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.engine.model.layers.attention import Attend
from quire.engine.model.layers.state_layers import GatedNorm, StateParts, checked, run_parts
from quire.kernels.cpu.linear_attention import Decay, LinearAttention
from quire.kernels.cpu.rows import Activation
from quire.kernels.torch_functions import without_replacements


@without_replacements
def run_lightning_attention(
    layer: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Run a layer like ``MiniMaxLightningAttention``; see ``run_parts``."""
    return run_parts(layer, attend, hidden_states, _parts), None


def _parts(layer: Any, dtype: torch.dtype) -> StateParts:
    weight, epsilon = layer.norm.weight32, layer.norm.epsilon
    return StateParts(
        projections=("qkv_proj", "output_gate"),
        expansions=(),
        divide=partial(_divide, layer),
        slopes=None,
        recurrence=checked(_weights(layer)),
        norm=GatedNorm(
            weight, epsilon, len(weight), dtype, False, activation=Activation.SIGMOID, rounds_inputs=True
        ),
        output="out_proj",
        activation=layer.act_fn,
    )


def _divide(layer: Any, outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    by_head = outputs[0].unflatten(-1, (layer.num_attention_heads, 3, layer.head_dim))
    return [by_head.transpose(2, 3).flatten(2)], [outputs[0][..., :0]], [outputs[1]]


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
