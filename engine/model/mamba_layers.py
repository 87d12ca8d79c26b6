"""Layers of Mamba 2, as in Bamba, Granite 4 and Falcon-H1, whose states are kept in KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.engine.model.check import UnsupportedModelError
from quire.kernels.cpu import rows
from quire.kernels.cpu.mamba import ROWS, Mamba
from quire.kernels.cpu.recurrence import LANES
from quire.kernels.cpu.rows import Activation, Norm


def run_mamba(
    layer: Any, attend: Callable[..., torch.Tensor], hidden_states: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Run a layer like ``BambaMixer`` with the states of earlier tokens from KV blocks.

    Args:
        layer: the layer.
        attend: attention with an argument ``recurrence``; see ``attention.attend``.
        hidden_states: ``[1, num_tokens, hidden_size]``.
    """
    dtype = hidden_states.dtype
    if hasattr(layer, "mup_vector"):  # Falcon-H1
        projected = layer.in_proj(hidden_states * layer.ssm_in_multiplier) * layer.mup_vector
    else:
        projected = layer.in_proj(hidden_states)
    sizes = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    gate, inputs, steps = projected.float().split(sizes, dim=-1)
    output = attend(inputs, steps, inputs, recurrence=_weights(layer))
    output = _gated_norm(layer.norm, output, gate, dtype)
    result: torch.Tensor = layer.out_proj(output.to(dtype))
    return result


def _gated_norm(
    norm: torch.nn.Module, output: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply by the gate and normalize each group, or the other way round; all rows alike."""
    gate = rows.activation(gate, Activation.SILU)
    weight = getattr(norm, "weight", None)
    if weight is None:  # Falcon-H1 may have no norm.
        return output * gate
    is_gated_first = not getattr(norm, "norm_before_gate", False)
    inputs = output * gate if is_gated_first else output
    group_size = getattr(norm, "group_size", None) or len(weight) // norm.n_groups  # type: ignore[operator]
    ones = torch.ones(int(group_size))
    groups = inputs.unflatten(-1, (-1, len(ones)))
    normed = rows.norm(groups, Norm.RMS, ones, None, float(norm.variance_epsilon)).flatten(-2)  # type: ignore[arg-type]
    scaled: torch.Tensor = weight * normed.to(dtype)
    return scaled if is_gated_first else scaled * gate


def _weights(layer: Any) -> Mamba:
    """Return the weights of a layer, converted at its first call."""
    kept: Mamba | None = getattr(layer, "recurrence", None)
    if kept is None:
        _check_variant(layer)
        num_channels = layer.conv_dim
        bias = torch.zeros(num_channels) if layer.conv1d.bias is None else layer.conv1d.bias
        kept = layer.recurrence = Mamba(
            taps=layer.conv1d.weight[:, 0].T.float().contiguous(),
            conv_bias=bias.float().contiguous(),
            decay=-torch.exp(layer.A_log.double()).float(),
            step_bias=layer.dt_bias.float().contiguous(),
            skip=layer.D.float().contiguous(),
            head_dim=layer.head_dim,
            num_groups=layer.n_groups,
            row_size=layer.ssm_state_size,
        )
    return kept


def _check_variant(layer: Any) -> None:
    """Raise UnsupportedModelError for a variant of Mamba 2 that the kernel does not compute."""
    if layer.conv1d.weight.device.type != "cpu":
        raise UnsupportedModelError("layers with a state run on the CPU only")
    if layer.activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"its layers with a state use {layer.activation!r}, and not 'silu'")
    if tuple(layer.time_step_limit) != (0.0, float("inf")):
        raise UnsupportedModelError(
            f"its layers with a state limit their time steps to {tuple(layer.time_step_limit)}, "
            "which transformers does for prompts and not for further tokens"
        )
    if layer.ssm_state_size % LANES or layer.head_dim % ROWS:
        raise UnsupportedModelError(
            f"its states have {layer.ssm_state_size} elements for each of {layer.head_dim} inputs of a head: "
            f"these must be multiples of {LANES} and {ROWS}"
        )
