"""Delta nets whose states are kept in KV blocks.

Those of Qwen3-Next, Qwen3.5 and Olmo Hybrid have one decay for each head. Kimi delta attention (KDA), as in
Kimi Linear and Ling 3.0, has one for each element of a key.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers.attention import Attend
from quire.engine.model.layers.state_layers import (
    GatedNorm,
    StateParts,
    checked,
    convolution_weights,
    decays_of_heads,
    run_parts,
)
from quire.kernels.cpu.linear_attention import Decay, LinearAttention
from quire.kernels.cpu.rows import Activation
from quire.kernels.torch_functions import without_replacements


@without_replacements
def run_delta_net(layer: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run a layer like ``Qwen3NextGatedDeltaNet`` or ``KimiLinearDeltaAttention``; see ``run_parts``."""
    return run_parts(layer, attend, hidden_states, _parts)


def _parts(layer: Any, dtype: torch.dtype) -> StateParts:
    if hasattr(layer, "forget_gate"):
        return _kimi_parts(layer, dtype)
    names: tuple[str, ...]
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next
        names, divide = ("in_proj_qkvz", "in_proj_ba"), partial(_divide_interleaved, layer)
    elif hasattr(layer, "in_proj_qkv"):  # Qwen3.5
        names, divide = ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z"), partial(_divide, 1, 3)
    else:
        names, divide = tuple(f"{each}_proj" for each in "qkvabg"), partial(_divide, 3, 5)
    norm, output = (layer.norm, "out_proj") if hasattr(layer, "out_proj") else (layer.o_norm, "o_proj")
    weight, epsilon = norm.weight.float(), float(norm.variance_epsilon)
    gated_norm = GatedNorm(weight, epsilon, layer.head_v_dim, dtype, is_gated_first=False)
    return StateParts(names, (), divide, None, checked(_weights(layer)), gated_norm, output)


def _divide(first: int, second: int, outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """Return the first outputs, those in the middle and the last ones."""
    return outputs[:first], outputs[first:second], outputs[second:]


def _divide_interleaved(layer: Any, outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    query, key, value, gate, beta, step = layer.fix_query_key_value_ordering(*outputs)
    return [query.flatten(2), key.flatten(2), value.flatten(2)], [step, beta], [gate.flatten(2)]


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


def _kimi_parts(layer: Any, dtype: torch.dtype) -> StateParts:
    forget = layer.forget_gate
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "b_proj")
    expansions: tuple[tuple[str, int], ...] = ()
    if hasattr(forget, "f_proj"):  # Ling 3.0
        names += ("forget_gate.f_proj", "g_proj")
    else:
        names += ("forget_gate.f_a_proj", "g_a_proj")
        expansions = (("forget_gate.f_b_proj", 4), ("g_b_proj", 5))
    slopes = None
    if _is_bounded(forget):
        slopes = torch.cat([_slopes(forget), torch.ones(layer.num_heads)])
    norm = layer.o_norm
    gated_norm = GatedNorm(
        norm.weight.float(),
        float(norm.variance_epsilon),
        layer.head_dim,
        torch.float32,
        is_gated_first=False,
        activation=Activation.SIGMOID,
    )
    recurrence = checked(_kimi_weights(layer))
    return StateParts(names, expansions, _divide_kimi, slopes, recurrence, gated_norm, "o_proj")


def _divide_kimi(outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    step, gate = outputs[-2:]
    return outputs[:3], [step, outputs[3]], [gate]


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
