"""What layers with a state have in common, around their recurrence."""

from __future__ import annotations

from typing import Any

import torch

from quire.engine.model.check import UnsupportedModelError
from quire.kernels.cpu import rows
from quire.kernels.cpu.rows import Activation, Norm


def check_layer(layer: Any, width: int, height: int, units: tuple[int, int]) -> None:
    """Raise UnsupportedModelError for a layer whose state no kernel updates.

    Args:
        layer: the layer, with its convolution ``conv1d`` and the name of its ``activation``.
        width, height: elements of a row of a head's state, and its rows.
        units: numbers of which the width and the height must be multiples.
    """
    if layer.conv1d.weight.device.type != "cpu":
        raise UnsupportedModelError("layers with a state run on the CPU only")
    if layer.activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"its layers with a state use {layer.activation!r}, and not 'silu'")
    if width % units[0] or height % units[1]:
        raise UnsupportedModelError(
            f"its states have {width} elements for each of {height} inputs of a head: "
            f"these must be multiples of {units[0]} and {units[1]}"
        )


def convolution_weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the taps ``[num_taps, num_channels]`` and the bias of a layer's convolution, in float32."""
    conv = layer.conv1d
    bias = torch.zeros(conv.weight.shape[0]) if conv.bias is None else conv.bias
    return conv.weight[:, 0].T.float().contiguous(), bias.float().contiguous()


def gated_norm(
    norm: Any,
    output: torch.Tensor,
    gate: torch.Tensor,
    dtype: torch.dtype,
    *,
    group_size: int,
    is_gated_first: bool,
) -> torch.Tensor:
    """Multiply by the gate and normalize each group, or the other way round; all rows alike.

    Args:
        norm: the layer's norm, with a weight for the last dimension of the output and ``variance_epsilon``.
        output, gate: float32 ``[..., size]``.
        dtype: the model's.
        group_size: values that are normalized together.
        is_gated_first: whether the norm comes after the gate.
    """
    gate = rows.activation(gate, Activation.SILU)
    inputs = output * gate if is_gated_first else output
    groups = inputs.unflatten(-1, (-1, group_size))
    normed = rows.norm(groups, Norm.RMS, torch.ones(group_size), None, float(norm.variance_epsilon))
    scaled: torch.Tensor = norm.weight * normed.flatten(-2).to(dtype)
    return scaled if is_gated_first else scaled * gate
