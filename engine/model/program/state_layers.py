"""The layers with a state in a compiled step: their records and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.engine.model.program.layer_records import linear_record
from quire.engine.model.program.state_recipe import StateRecipe, first_columns
from quire.engine.model.states import States
from quire.kernels.cpu import linear_attention, recurrence, rows
from quire.kernels.cpu.intrinsics import STORAGE
from quire.kernels.cpu.rows import Norm
from quire.kernels.cpu.step.records import LINEAR, STATE_LAYER
from quire.kernels.metadata import AttentionMetadata

Array = np.ndarray[Any, np.dtype[Any]]

_PARTS = ("inputs", "steps", "gate")


class StateLayers:
    """Records of the layers, and the buffers that they share.

    Args:
        recipes: the layers.
        states: where their states lie.
        counters: the address of three counters for each layer.

    Attributes:
        addresses: those of the layers' records.
        num_columns: number of outputs of the linear layers of a layer's inputs, the most of all layers.
    """

    def __init__(self, recipes: Sequence[StateRecipe], states: States, counters: Sequence[int]) -> None:
        self._recipes, self._states = recipes, states
        self._layers = np.zeros(len(recipes), STATE_LAYER)
        self._convolutions = np.zeros(len(recipes), recurrence.ARGUMENTS)
        self._recurrences = np.zeros(len(recipes), linear_attention.ARGUMENTS)
        self._norms = np.zeros(len(recipes), rows.ARGUMENTS)
        # Records contain only addresses, so these references keep the memory alive.
        self._held: list[Any] = []
        self._buffers: list[torch.Tensor] = []
        for index, (recipe, counter) in enumerate(zip(recipes, counters, strict=True)):
            self._fill_layer(self._layers[index], recipe)
            self._fill_recurrence(index, recipe, counter)
            self._fill_norm(index, recipe, counter + 16)
        num_fields = len(recurrence.SEQUENCE_FIELDS)
        self._sequences = [
            each.view(np.int64).reshape(len(recipes), -1)[:, first : first + num_fields]
            for each, first in (
                (self._convolutions, recurrence.FIELDS.index("tables")),
                (self._recurrences, linear_attention.FIELDS.index("tables")),
            )
        ]
        outputs = np.array([each.parts.recurrence.num_outputs for each in recipes])
        self._num_groups = outputs // self._norms["length"]
        self.addresses = _addresses(self._layers)
        self.num_columns = int(self._layers["stride"].max())

    def place(self, metadata: AttentionMetadata, num_tokens: int) -> None:
        """Tell the layers which sequences a step has."""
        sequences = recurrence.sequence_values(metadata)
        for fields in self._sequences:
            fields[:] = sequences
        self._norms["num_rows"] = num_tokens * self._num_groups

    def grow(self, capacity: int, attended: int) -> None:
        """Make room for a number of tokens; ``attended`` is the address of what goes to the last layers."""
        widths = [int(self._layers[part]["width"].max()) for part in _PARTS]
        outputs = max(each.parts.recurrence.num_outputs for each in self._recipes)
        self._buffers = [torch.empty((capacity, width)) for width in (*widths, widths[0], outputs)]
        inputs, steps, gate, mixed, advanced = (each.data_ptr() for each in self._buffers)
        for part, address in zip(_PARTS, (inputs, steps, gate), strict=True):
            self._layers[part]["values"] = address
        self._convolutions["inputs"], self._convolutions["mixed"] = inputs, mixed
        self._recurrences["mixed"] = np.where(self._layers["convolution"] == 0, inputs, mixed)
        self._recurrences["steps"], self._recurrences["outputs"] = steps, advanced
        self._layers["rounded"] = advanced
        for name, address in (("inputs", advanced), ("gates", gate), ("outputs", attended)):
            self._norms[name] = address

    def _fill_layer(self, row: Any, recipe: StateRecipe) -> None:
        linears = (*recipe.projections, *recipe.expansions)
        columns, num = first_columns(linears), len(recipe.projections)
        projections = np.array([linear_record(each) for each in linears], LINEAR)
        projections["input_column"][num:] = [columns[number] for _, number in recipe.parts.expansions]
        row["projections"], row["stride"] = self._hold(projections), columns[-1]
        row["num_projections"], row["num_expansions"] = num, len(recipe.expansions)
        row["expanded_column"] = columns[num]
        for name, part in zip(_PARTS, recipe.columns, strict=True):
            runs = _runs(part)
            row[name]["runs"], row[name]["num_runs"] = self._hold(runs), len(runs)
            row[name]["width"] = len(part)
        if recipe.parts.activation is not None:
            row["activation"] = recipe.parts.activation.kind
        row["slopes"] = 0 if recipe.parts.slopes is None else recipe.parts.slopes.data_ptr()

    def _fill_recurrence(self, index: int, recipe: StateRecipe, counter: int) -> None:
        weights, places = recipe.parts.recurrence, self._states.places(recipe.number)
        advance = {
            **dict(zip(linear_attention.CONSTANT_FIELDS, weights.constants, strict=True)),
            "num_channels": len(recipe.columns[0]),
            "num_steps": len(recipe.columns[1]),
            "next_task": counter + 8,
        }
        kernels = [("recurrence", linear_attention, self._recurrences, advance, places)]
        if weights.taps is not None and weights.conv_bias is not None:
            convolution = {
                "taps": weights.taps.data_ptr(),
                "bias": weights.conv_bias.data_ptr(),
                "num_taps": len(weights.taps),
                "num_channels": len(recipe.columns[0]),
                "next_task": counter,
            }
            conv_places = weights.conv_places(places)
            kernels.append(("convolution", recurrence, self._convolutions, convolution, conv_places))
        row = self._layers[index]
        for name, module, records, values, where in kernels:
            values |= recurrence.layer_values(where, weights.row_size)
            for field, value in values.items():
                records[index][field] = value
            row[name] = _addresses(records)[index]
            row[f"{name}_kernel"] = module.kernel().address

    def _fill_norm(self, index: int, recipe: StateRecipe, counter: int) -> None:
        norm = recipe.parts.norm
        row = self._layers[index]
        row["norm"] = _addresses(self._norms)[index]
        gate_dtype = norm.dtype if norm.rounds_inputs else torch.float32
        row["norm_kernel"] = rows.kernel(STORAGE[norm.dtype], STORAGE[gate_dtype]).address
        row["rounded_width"] = recipe.parts.recurrence.num_outputs if norm.rounds_inputs else 0
        values = {
            "weight": norm.weight.data_ptr(),
            "next_row": counter,
            "length": norm.group_size,
            "input_stride": norm.group_size,
            "gate_stride": norm.group_size,
            "num_weight_rows": len(norm.weight) // norm.group_size,
            "norm": Norm.RMS,
            "gate_activation": norm.activation,
            "is_gated_first": norm.is_gated_first,
            "epsilon": norm.epsilon,
        }
        for field, value in values.items():
            self._norms[index][field] = value

    def _hold(self, array: Array) -> int:
        self._held.append(array)
        return int(array.ctypes.data)


def _addresses(records: Array) -> list[int]:
    return [records.ctypes.data + index * records.itemsize for index in range(len(records))]


def _runs(columns: torch.Tensor) -> Array:
    """Return the first column of each run of neighbors, and its length."""
    values = columns.numpy()
    starts = np.flatnonzero(np.diff(values, prepend=-2) != 1)
    return np.stack((values[starts], np.diff(starts, append=len(values))), axis=1)
