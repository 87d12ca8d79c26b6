"""Delta nets whose states are kept in KV blocks.

Those of Qwen3-Next, Qwen3.5 and Olmo Hybrid have one decay for each head. Kimi delta attention (KDA), as in
Kimi Linear and Ling 3.0, has one for each element of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers.state_layers import (
    convolution_weights,
    decays_of_heads,
    gated_norm,
    kept_weights,
)
from quire.kernels.cpu.linear_attention import Decay, LinearAttention
from quire.kernels.cpu.rows import Activation
from quire.kernels.torch_functions import without_replacements


@without_replacements
def run_delta_net(
    layer: Any, attend: Callable[..., torch.Tensor], hidden_states: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Run a layer like ``Qwen3NextGatedDeltaNet``; see ``run_mamba``."""
    inputs, steps, gate = (torch.cat(each, dim=-1).float() for each in _projected(layer, hidden_states))
    output = attend(inputs, steps, inputs, recurrence=kept_weights(layer, _weights))
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


def _weights(layer: Any) -> LinearAttention:
    taps, bias = convolution_weights(layer)
    rates, step_bias = decays_of_heads(layer)
    return LinearAttention(
        taps=taps,
        conv_bias=bias,
        decay=Decay.SOFTPLUS,
        rates=rates,
        step_bias=step_bias,
        skip=torch.zeros(layer.num_v_heads),
        num_key_heads=layer.num_k_heads,
        key_dim=layer.head_k_dim,
        row_size=layer.head_v_dim,
        most_replaced=2 if getattr(layer, "allow_neg_eigval", False) else 1,
    )


@without_replacements
def run_kimi_delta_attention(
    layer: Any, attend: Callable[..., torch.Tensor], hidden_states: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Run a layer like ``KimiLinearDeltaAttention``; see ``run_delta_net``."""
    forget = layer.forget_gate
    inputs = torch.cat(
        [layer.q_proj(hidden_states), layer.k_proj(hidden_states), layer.v_proj(hidden_states)], -1
    )
    if hasattr(forget, "f_proj"):  # Ling 3.0
        steps, gate = forget.f_proj(hidden_states), layer.g_proj(hidden_states)
    else:
        steps = forget.f_b_proj(forget.f_a_proj(hidden_states))
        gate = layer.g_b_proj(layer.g_a_proj(hidden_states))
    steps = steps.float()
    if _is_bounded(forget):
        steps = steps * _slopes(forget)
    steps = torch.cat([steps, layer.b_proj(hidden_states).float()], dim=-1)
    inputs = inputs.float()
    output = attend(inputs, steps, inputs, recurrence=kept_weights(layer, _kimi_weights))
    output, gate = (each.float().unflatten(-1, (-1, layer.head_dim)) for each in (output, gate))
    output = gated_norm(
        layer.o_norm,
        output,
        gate,
        torch.float32,
        group_size=layer.head_dim,
        is_gated_first=False,
        activation=Activation.SIGMOID,
    )
    result: torch.Tensor = layer.o_proj(output.flatten(-2).to(hidden_states.dtype))
    return result


def _is_bounded(forget: Any) -> bool:
    """Return whether decays are bounded below: the logarithm is a sigmoid times the bound."""
    return bool(getattr(forget, "safe_gate", False))


def _slopes(forget: Any) -> torch.Tensor:
    """Return ``exp(A)`` for each row of the states, ``[num_heads * key_dim]``."""
    slopes: torch.Tensor = torch.exp(forget.A_log.double()).float()
    return slopes.flatten().repeat_interleave(forget.head_dim)


def _kimi_weights(layer: Any) -> LinearAttention:
    taps, bias = convolution_weights(layer)
    forget, shape = layer.forget_gate, (layer.num_heads, layer.head_dim)
    step_bias, slopes = forget.dt_bias.float(), _slopes(forget)
    rates = -slopes.view(shape)[:, 0].contiguous()
    if is_bounded := _is_bounded(forget):
        if forget.lower_bound > 0:
            raise UnsupportedModelError(f"its states would grow: kda_lower_bound is {forget.lower_bound}")
        step_bias, rates = slopes * step_bias, torch.full_like(rates, forget.lower_bound)
    return LinearAttention(
        taps=taps,
        conv_bias=bias,
        decay=Decay.SIGMOID if is_bounded else Decay.SOFTPLUS,
        rates=rates,
        step_bias=step_bias.view(shape).contiguous(),
        skip=torch.zeros(layer.num_heads),
        num_key_heads=layer.num_heads,
        key_dim=layer.head_dim,
        row_size=layer.head_dim,
        most_replaced=1,
    )
