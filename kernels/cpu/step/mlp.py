"""The MLP of a layer in a step's program."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import exact, fetch_and_increment, keep_apart, pointer
from quire.kernels.cpu.products.low_rank import LINEARS, add_updates
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.unit_product import ROWS, place_of
from quire.kernels.cpu.rows import activate, narrow
from quire.kernels.cpu.step.added_layers import compute_added
from quire.kernels.cpu.step.linear_layers import compute_unit, operands, project_rows
from quire.kernels.cpu.step.records import COUNTERS_PER_LAYER
from quire.kernels.cpu.step.team import wait

_NUM_LINEARS, _GATE, _DOWN = len(LINEARS), LINEARS.index("gate"), LINEARS.index("down")


@exact
def run_mlp(args: Any, layer: Any, index: int, team: Any, storage: Any, stored: Any) -> None:
    """Compute the MLP of a layer up to its result in ``update``."""
    keep_apart()
    counters, at = args.counters + 8 * COUNTERS_PER_LAYER * index, _NUM_LINEARS * index
    length = args.mlp_stride
    project_rows(args, at + _GATE, _DOWN - _GATE, args.normed, args.hidden_size, team, storage)
    _run_gate(args, layer, at + _GATE, counters + 16, storage, stored)
    wait(args, team)
    at += _DOWN
    compute_added(args, layer.down, at, counters + 24, args.mlp, length, False, team, storage, stored)


@exact
def _run_gate(args: Any, layer: Any, first_linear: int, counter: int, storage: Any, stored: Any) -> None:
    """Compute the first half of the MLP: ``activation(gate) * up``, or ``activation(gate)`` without up."""
    keep_apart()
    gates = np.empty((ROWS, UNIT), np.float32)
    stride, (inputs_at, input_stride) = args.mlp_stride, operands(args, args.normed, args.hidden_size, stored)
    while True:
        program = np.int64(fetch_and_increment(counter))
        if program >= layer.gate.num_units * -(-args.num_tokens // ROWS):
            break
        unit, first = place_of(program, args.num_tokens)
        num_rows = min(ROWS, args.num_tokens - first)
        inputs = (inputs_at + first * input_stride, input_stride)
        gates_at = np.int64(gates.ctypes.data)
        compute_unit(layer.gate, unit, inputs, (gates_at, UNIT), num_rows, storage)
        adapted, rows = args.adapted, (first, num_rows)
        if adapted.num_rows != 0:
            add_updates(adapted, first_linear, 0, rows, unit, gates_at, UNIT, storage)
        activate(layer.activation, gates_at, num_rows * UNIT, storage)
        output = args.mlp + 4 * (first * stride + unit * UNIT)
        outputs = carray(pointer(output, np.float32), (num_rows, stride))
        if layer.up.num_units:
            compute_unit(layer.up, unit, inputs, (output, stride), num_rows, storage)
            if adapted.num_rows != 0:
                add_updates(adapted, first_linear + 1, 1, rows, unit, output, stride, storage)
            for row in range(num_rows):
                for column in range(UNIT):
                    outputs[row, column] = narrow(gates[row, column] * outputs[row, column], storage)
        else:
            for row in range(num_rows):
                for column in range(UNIT):
                    outputs[row, column] = gates[row, column]
