"""Gated delta nets, as in Qwen3-Next, Qwen3.5 and Olmo Hybrid, whose states are kept in KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.engine.model.state_layers import check_layer, convolution_weights, gated_norm
from quire.kernels.cpu.delta_net import ROWS, DeltaNet
from quire.kernels.cpu.recurrence import LANES


def run_delta_net(
    layer: Any, attend: Callable[..., torch.Tensor], hidden_states: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Run a layer like ``Qwen3NextGatedDeltaNet`` with the states of earlier tokens from KV blocks.

    Args:
        layer: the layer.
        attend: attention with an argument ``recurrence``; see ``attention.attend``.
        hidden_states: ``[1, num_tokens, hidden_size]``.
    """
    inputs, steps, gate = (torch.cat(each, dim=-1).float() for each in _projected(layer, hidden_states))
    output = attend(inputs, steps, inputs, recurrence=_weights(layer))
    norm, projection = (
        (layer.norm, layer.out_proj) if hasattr(layer, "out_proj") else (layer.o_norm, layer.o_proj)
    )
    size, dtype = layer.head_v_dim, hidden_states.dtype
    output, gate = (each.unflatten(-1, (-1, size)) for each in (output, gate))
    output = gated_norm(norm, output, gate, dtype, group_size=size, is_gated_first=False)
    result: torch.Tensor = projection(output.flatten(-2).to(dtype))
    return result


def _projected(layer: Any, hidden_states: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
    """Return the parts of the inputs of the convolution, of the steps, and of the gate."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next
        projected = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        query, key, value, gate, beta, step = layer.fix_query_key_value_ordering(*projected)
        return [query.flatten(2), key.flatten(2), value.flatten(2)], [step, beta], [gate.flatten(2)]
    names = (
        (("in_proj_qkv",), ("in_proj_a", "in_proj_b"), ("in_proj_z",))  # Qwen3.5
        if hasattr(layer, "in_proj_qkv")
        else (("q_proj", "k_proj", "v_proj"), ("a_proj", "b_proj"), ("g_proj",))
    )
    return tuple([getattr(layer, name)(hidden_states) for name in part] for part in names)


def _weights(layer: Any) -> DeltaNet:
    """Return the weights of a layer, converted at its first call."""
    kept: DeltaNet | None = getattr(layer, "recurrence", None)
    if kept is None:
        check_layer(layer, layer.head_v_dim, layer.head_k_dim, (LANES, ROWS))
        taps, bias = convolution_weights(layer)
        kept = layer.recurrence = DeltaNet(
            taps=taps,
            conv_bias=bias,
            decay=-torch.exp(layer.A_log.double()).float(),
            step_bias=layer.dt_bias.float().contiguous(),
            num_key_heads=layer.num_k_heads,
            key_dim=layer.head_k_dim,
            row_size=layer.head_v_dim,
            most_replaced=2 if getattr(layer, "allow_neg_eigval", False) else 1,
        )
    return kept
