"""What layers with a state have in common, around their recurrence."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers.attention import Attend
from quire.kernels.cpu import rows
from quire.kernels.cpu.linear_attention import ROWS, LinearAttention
from quire.kernels.cpu.recurrence import LANES, Recurrence
from quire.kernels.cpu.rows import Activation, Gate, Norm

_Recurrence = TypeVar("_Recurrence", bound=Recurrence)


def kept_weights(layer: Any, make: Callable[[Any], Recurrence]) -> Recurrence:
    """Return the weights of a layer, which are made at its first call.

    Raises:
        UnsupportedModelError: no kernel updates its state.
    """
    kept: Recurrence | None = getattr(layer, "recurrence", None)
    if kept is None:
        kept = layer.recurrence = checked(make(layer))
    return kept


def checked(recurrence: _Recurrence) -> _Recurrence:
    """Return the weights of a recurrence.

    Raises:
        UnsupportedModelError: no kernel updates its state.
    """
    if recurrence.rates.device.type != "cpu":
        raise UnsupportedModelError("layers with a state run on the CPU only")
    if recurrence.row_size % LANES or recurrence.key_dim % ROWS:
        raise UnsupportedModelError(
            f"the states of its layers have {recurrence.key_dim} rows of {recurrence.row_size} elements for "
            f"each head: these must be multiples of {ROWS} and {LANES}"
        )
    return recurrence


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


class GatedNorm(NamedTuple):
    """A norm of groups of values, which are also multiplied by a gate.

    Attributes:
        weight: float32, of one group or of several that follow each other.
        epsilon: added to the mean square.
        group_size: values that are normalized together.
        dtype: to which normalized values are rounded.
        is_gated_first: whether the norm comes after the gate.
        activation: that of the gate.
        rounds_inputs: whether the values and the activated gate are rounded to ``dtype`` before.
    """

    weight: torch.Tensor
    epsilon: float
    group_size: int
    dtype: torch.dtype
    is_gated_first: bool
    activation: Activation = Activation.SILU
    rounds_inputs: bool = False

    def __call__(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the result for float32 ``[..., size]`` and a gate of the same shape; all rows alike."""
        if self.rounds_inputs:
            output, gate = output.to(self.dtype), gate.to(self.dtype)
        groups, gates = (each.unflatten(-1, (-1, self.group_size)) for each in (output, gate))
        of_gate = Gate(gates, self.activation, self.is_gated_first)
        normed = rows.norm(groups, Norm.RMS, self.weight, None, self.epsilon, dtype=self.dtype, gate=of_gate)
        return normed.flatten(-2)


class StateParts(NamedTuple):
    """What a layer with a state computes around its recurrence.

    Attributes:
        projections: the names of the linear layers of its inputs.
        expansions: the names of further linear layers, whose inputs are the outputs of a projection, and the
            numbers of these projections.
        divide: function that divides the outputs of all these layers into the parts of the inputs of the
            recurrence, of its steps, and of the gate.
        slopes: factors of the steps; None if there are none.
        recurrence: the weights of the recurrence.
        norm: what follows the recurrence.
        output: the name of the last linear layer.
        activation: what is applied to the inputs of the recurrence; None if there is none.
    """

    projections: tuple[str, ...]
    expansions: tuple[tuple[str, int], ...]
    divide: Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], ...]]
    slopes: torch.Tensor | None
    recurrence: LinearAttention
    norm: GatedNorm
    output: str
    activation: torch.nn.Module | None = None


def run_parts(
    layer: Any,
    attend: Attend,
    hidden_states: torch.Tensor,
    make: Callable[[Any, torch.dtype], StateParts],
) -> torch.Tensor:
    """Run a layer with the states of earlier tokens from KV blocks.

    Args:
        layer: the layer.
        attend: attention with an argument ``recurrence``; see ``attention.attend``.
        hidden_states: ``[1, num_tokens, hidden_size]``.
        make: function that returns the parts of the layer, given the dtype of the model, at the first call.
    """
    dtype = hidden_states.dtype
    if not hasattr(layer, "parts"):
        layer.parts = make(layer, dtype)
    parts: StateParts = layer.parts
    outputs = [attrgetter(name)(layer)(hidden_states) for name in parts.projections]
    outputs += [attrgetter(name)(layer)(outputs[number]) for name, number in parts.expansions]
    inputs, steps, gate = (torch.cat(each, dim=-1) for each in parts.divide(outputs))
    if parts.activation is not None:
        inputs = parts.activation(inputs)
    inputs, steps, gate = inputs.float(), steps.float(), gate.float()
    if parts.slopes is not None:
        steps = steps * parts.slopes
    output = parts.norm(attend(inputs, steps, inputs, recurrence=parts.recurrence), gate)
    result: torch.Tensor = getattr(layer, parts.output)(output.to(dtype))
    return result
