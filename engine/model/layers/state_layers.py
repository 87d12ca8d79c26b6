"""What layers with a state have in common, around their recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.engine.model.check import UnsupportedModelError
from quire.kernels.cpu import rows
from quire.kernels.cpu.linear_attention import ROWS
from quire.kernels.cpu.recurrence import LANES, Recurrence
from quire.kernels.cpu.rows import Activation, Gate, Norm


def kept_weights(layer: Any, make: Callable[[Any], Recurrence]) -> Recurrence:
    """Return the weights of a layer, which are made at its first call.

    Raises:
        UnsupportedModelError: no kernel updates its state.
    """
    kept: Recurrence | None = getattr(layer, "recurrence", None)
    if kept is None:
        kept = make(layer)
        if kept.rates.device.type != "cpu":
            raise UnsupportedModelError("layers with a state run on the CPU only")
        if kept.row_size % LANES or kept.key_dim % ROWS:
            raise UnsupportedModelError(
                f"the states of its layers have {kept.key_dim} rows of {kept.row_size} elements for each "
                f"head: these must be multiples of {ROWS} and {LANES}"
            )
        layer.recurrence = kept
    return kept


def convolution_weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the taps ``[num_taps, num_channels]`` and the bias of a layer's convolution, in float32.

    Raises:
        UnsupportedModelError: another activation than SiLU follows it.
    """
    if layer.activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"its layers with a state use {layer.activation!r}, and not 'silu'")
    conv = layer.conv1d
    bias = torch.zeros(conv.weight.shape[0]) if conv.bias is None else conv.bias
    return conv.weight[:, 0].T.float().contiguous(), bias.float().contiguous()


def decays_of_heads(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rates, and the biases of the steps, of a layer with one decay for each head."""
    return -torch.exp(layer.A_log.double()).float(), layer.dt_bias.float()[:, None].contiguous()


def gated_norm(
    norm: Any,
    output: torch.Tensor,
    gate: torch.Tensor,
    dtype: torch.dtype,
    *,
    group_size: int,
    is_gated_first: bool,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    """Multiply by the gate and normalize each group, or the other way round; all rows alike.

    Args:
        norm: the layer's norm, with a weight for the last dimension of the output and ``variance_epsilon``.
        output, gate: float32 ``[..., size]``.
        dtype: the model's.
        group_size: values that are normalized together.
        is_gated_first: whether the norm comes after the gate.
        activation: that of the gate.
    """
    groups, gates = (each.unflatten(-1, (-1, group_size)) for each in (output, gate))
    of_gate = Gate(gates, activation, is_gated_first)
    epsilon, weight = float(norm.variance_epsilon), norm.weight.float()
    normed = rows.norm(groups, Norm.RMS, weight, None, epsilon, dtype=dtype, gate=of_gate)
    return normed.flatten(-2)
