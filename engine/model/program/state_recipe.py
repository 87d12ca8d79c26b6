"""What a program needs to know of a layer with a state, read from the layer."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.model.layers.row_layers import KernelActivation
from quire.engine.model.layers.state_layers import StateParts
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.stored_types import FLOATS, form_of_inputs


@dataclass(frozen=True)
class StateRecipe:
    """A layer with a state, such as a gated delta net.

    Attributes:
        module: the layer.
        number: the number of its state.
        parts: what it computes.
        projections: the linear layers of its inputs.
        expansions: further linear layers, whose inputs are the outputs of some of the former.
        columns: where the inputs of the recurrence, its steps and the gate lie among the outputs of all these
            layers. A layer's outputs begin at a multiple of ``UNIT``.
        output: the last linear layer.
    """

    module: torch.nn.Module
    number: int
    parts: StateParts
    projections: tuple[PackedLinear, ...]
    expansions: tuple[PackedLinear, ...]
    columns: tuple[torch.Tensor, ...]
    output: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """All linear layers."""
        return (*self.projections, *self.expansions, self.output)


def first_columns(linears: tuple[PackedLinear, ...]) -> list[int]:
    """Return the first column of each layer's outputs, and the number of columns."""
    columns = [0]
    for each in linears:
        columns.append(columns[-1] + each.packed.num_units * UNIT)
    return columns


def read_states(layer: Any) -> StateRecipe | None:
    """Return the recipe of a layer with a state; None if the program cannot compute it."""
    parts: StateParts | None = getattr(layer, "parts", None)
    if parts is None or not isinstance(parts.activation, KernelActivation | None):
        return None
    names = *parts.projections, *(name for name, _ in parts.expansions), parts.output
    linears = tuple(attrgetter(name)(layer) for name in names)
    if not all(isinstance(each, PackedLinear) for each in linears):
        return None
    num, before = len(parts.projections), linears[:-1]
    if any(form_of_inputs(each.packed.stored) != FLOATS for each in linears[num:-1]):
        return None
    indices = [
        torch.arange(first, first + each.out_features).float()[None, None]
        for first, each in zip(first_columns(before), before, strict=False)
    ]
    columns = tuple(torch.cat(each, dim=-1).flatten().long() for each in parts.divide(indices))
    return StateRecipe(layer, layer.state_number, parts, before[:num], before[num:], columns, linears[-1])
