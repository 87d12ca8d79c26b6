"""Layers of Mamba 1 and 2, as in Jamba, Bamba and Falcon-H1, whose states are kept in KV blocks."""

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
    kept_weights,
    run_parts,
)
from quire.kernels.cpu import rows
from quire.kernels.cpu.linear_attention import Decay, LinearAttention
from quire.kernels.cpu.rows import Activation
from quire.kernels.cpu.selective_scan import SelectiveScan

_SHORT_STEP = 1e-3
"""To this, transformers lengthens time steps of Nemotron-H's prompts, and not those of further tokens.

Here they stay as they are, since a state must not depend on which tokens belong to the prompt.
"""


def run_mamba(layer: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run a layer like ``BambaMixer`` with the states of earlier tokens from KV blocks.

    Args:
        layer: the layer.
        attend: attention with an argument ``recurrence``; see ``attention.attend``.
        hidden_states: ``[1, num_tokens, hidden_size]``.
    """
    if not hasattr(layer, "mup_vector"):
        return run_parts(layer, attend, hidden_states, _parts)
    # Falcon-H1 may have no norm.
    projected = layer.in_proj(hidden_states * layer.ssm_in_multiplier) * layer.mup_vector
    parts, [steps], [gate] = _divide(layer, [projected.float()])
    inputs = torch.cat(parts, dim=-1)
    output = attend(inputs, steps, inputs, recurrence=kept_weights(layer, _weights))
    if getattr(layer.norm, "weight", None) is None:
        output = output * rows.activation(gate, Activation.SILU)
    else:
        output = _norm(layer.norm, hidden_states.dtype)(output, gate)
    result: torch.Tensor = layer.out_proj(output.to(hidden_states.dtype))
    return result


def _parts(layer: Any, dtype: torch.dtype) -> StateParts:
    norm = _norm(layer.norm, dtype)
    divide = partial(_divide, layer)
    return StateParts(("in_proj",), (), divide, None, checked(_weights(layer)), norm, "out_proj")


def _norm(norm: Any, dtype: torch.dtype) -> GatedNorm:
    weight: torch.Tensor = norm.weight.float()
    group_size = getattr(norm, "group_size", None) or len(weight) // norm.n_groups
    is_gated_first = not getattr(norm, "norm_before_gate", False)
    return GatedNorm(weight, float(norm.variance_epsilon), group_size, dtype, is_gated_first)


def _divide(layer: Any, outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    sizes = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    gate, inputs, steps = outputs[0].split(sizes, dim=-1)
    return _as_attention(layer, inputs), [steps], [gate]


def _as_attention(layer: Any, channels: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of the last dimension, x, B and C, as queries, keys and values: C, B and x."""
    size = layer.n_groups * layer.ssm_state_size
    x, b, c = channels.split([layer.intermediate_size, size, size], dim=-1)
    return [c, b, x]


def _weights(layer: Any) -> LinearAttention:
    shortest, longest = layer.time_step_limit
    if shortest > _SHORT_STEP or longest != float("inf"):
        raise UnsupportedModelError(
            f"its layers with a state limit their time steps to {tuple(layer.time_step_limit)}, "
            "which transformers does for prompts and not for further tokens"
        )
    taps, bias = (torch.cat(_as_attention(layer, each), dim=-1) for each in convolution_weights(layer))
    rates, step_bias = decays_of_heads(layer)
    return LinearAttention(
        taps=taps,
        conv_bias=bias,
        decay=Decay.SOFTPLUS,
        rates=rates,
        step_bias=step_bias,
        skip=layer.D.float().contiguous(),
        num_key_heads=layer.n_groups,
        key_dim=layer.ssm_state_size,
        row_size=layer.head_dim,
        most_replaced=0,
    )


def run_selective_scan(layer: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run a layer like ``MambaMixer``; see ``run_mamba``."""
    inputs, gate = layer.in_proj(hidden_states).float().chunk(2, dim=-1)
    output = attend(inputs, inputs, inputs, recurrence=kept_weights(layer, _scan_weights))
    output = output * rows.activation(gate, Activation.SILU)
    result: torch.Tensor = layer.out_proj(output.to(hidden_states.dtype))
    return result


def _scan_weights(layer: Any) -> SelectiveScan:
    taps, bias = convolution_weights(layer)
    rates = -torch.exp(layer.A_log.double()).float().T.contiguous()
    select = partial(_select, layer, layer.conv1d.weight.dtype)
    return SelectiveScan(taps, bias, rates, layer.D.float().contiguous(), select)


def _select(layer: Any, dtype: torch.dtype, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the steps, b and c of inputs; see ``SelectiveScan``."""
    size = layer.ssm_state_size
    step, b, c = layer.x_proj(inputs.to(dtype)).split([layer.time_step_rank, size, size], dim=-1)
    if hasattr(layer, "dt_layernorm"):  # Jamba and Falcon Mamba
        step, b, c = layer.dt_layernorm(step), layer.b_layernorm(b), layer.c_layernorm(c)
    return layer.dt_proj(step), b, c
