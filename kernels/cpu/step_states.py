"""Layers with a state in a step's program, before their last linear layer; see ``step``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import call, exact, fetch_and_increment, keep_apart, pointer
from quire.kernels.cpu.products.linear import ROWS, UNIT
from quire.kernels.cpu.products.packed_product import row_bytes
from quire.kernels.cpu.rows import activate
from quire.kernels.cpu.step_parts import compute_unit, copy, narrow_rows, operands, wait
from quire.kernels.cpu.step_records import PROJECTION, STATE_LAYER


@exact
def _project(
    args: Any,
    states: Any,
    numbers: Any,
    column: int,
    counter: int,
    inputs: Any,
    storage: Any,
    item_bytes: int,
) -> None:
    """Compute some linear layers; their outputs lie side by side from a column on.

    Args:
        numbers: the first layer, and the end of the layers.
        inputs: the address of their inputs, and the bytes between tokens.
    """
    keep_apart()
    projections = carray(pointer(states.projections, PROJECTION), (numbers[1],))
    num_units = 0
    for number in range(numbers[0], numbers[1]):
        num_units += projections[number].linear.num_units
    while True:
        program = np.int64(fetch_and_increment(counter))
        if program >= num_units * -(-args.num_tokens // ROWS):
            break
        unit, row = program % num_units, program // num_units * ROWS
        number, own_unit = numbers[0], unit
        while own_unit >= projections[number].linear.num_units:
            own_unit -= projections[number].linear.num_units
            number += 1
        linear, stride, num_rows = projections[number].linear, states.stride, min(ROWS, args.num_tokens - row)
        source = inputs[0] + row * inputs[1] + 4 * projections[number].input_column
        output = args.qkv + 4 * (row * stride + column + unit * UNIT)
        compute_unit(linear, own_unit, source, inputs[1], output, stride, num_rows, storage, item_bytes)


@exact
def _gather(args: Any, states: Any, part: Any, factors_at: int, first: int, end: int) -> None:
    """Copy a part of the outputs of the linear layers, multiplied by factors unless their address is 0."""
    keep_apart()
    runs = carray(pointer(part.runs, np.int64), (part.num_runs, 2))
    for token in range(first, end):
        target = part.values + 4 * token * part.width
        at = target
        for run in range(part.num_runs):
            copy(args.qkv + 4 * (token * states.stride + runs[run, 0]), at, runs[run, 1])
            at += 4 * runs[run, 1]
        if factors_at != 0:
            values = carray(pointer(target, np.float32), (part.width,))
            factors = carray(pointer(factors_at, np.float32), (part.width,))
            for i in range(part.width):
                values[i] *= factors[i]


@exact
def advance_states(
    args: Any,
    layer: Any,
    counters: int,
    thread: int,
    num_threads: int,
    phase: int,
    storage: Any,
    item_bytes: int,
    stored: Any,
) -> int:
    """Update the states of a layer, and write the inputs of its last linear layer; return the next phase."""
    keep_apart()
    states = carray(pointer(layer.states, STATE_LAYER), 1)[0]
    num, num_all = states.num_projections, states.num_projections + states.num_expansions
    inputs = (operands(args, args.normed, stored), row_bytes(args.hidden_size, stored))
    _project(args, states, (0, num), 0, counters, inputs, storage, item_bytes)
    phase = wait(args, num_threads, phase)
    if num_all > num:
        inputs, column = (args.qkv, 4 * states.stride), states.expanded_column
        _project(args, states, (num, num_all), column, counters + 32, inputs, storage, item_bytes)
        phase = wait(args, num_threads, phase)
    first, end = args.num_tokens * thread // num_threads, args.num_tokens * (thread + 1) // num_threads
    _gather(args, states, states.inputs, 0, first, end)
    width = states.inputs.width
    inputs_at = states.inputs.values + 4 * first * width
    activate(states.activation, inputs_at, (end - first) * width, storage)
    _gather(args, states, states.steps, states.slopes, first, end)
    _gather(args, states, states.gate, 0, first, end)
    phase = wait(args, num_threads, phase)
    if states.convolution != 0:
        call(states.convolution_kernel, (states.convolution,))
        phase = wait(args, num_threads, phase)
    call(states.recurrence_kernel, (states.recurrence,))
    phase = wait(args, num_threads, phase)
    if item_bytes < 4 and states.rounded_width != 0:
        narrow_rows(states.rounded, states.rounded_width, first, end, storage)
        phase = wait(args, num_threads, phase)
    call(states.norm_kernel, (states.norm,))
    return wait(args, num_threads, phase)  # type: ignore[no-any-return]
