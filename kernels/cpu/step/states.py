"""Layers with a state in a step's program, before their last linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import call, exact, item_bytes, keep_apart, pointer
from quire.kernels.cpu.rows import activate
from quire.kernels.cpu.step.linear_layers import NOT_ADAPTED, compute_linears, operands
from quire.kernels.cpu.step.records import LINEAR, STATE_LAYER
from quire.kernels.cpu.step.team import share, wait
from quire.kernels.cpu.step.vectors import copy, narrow_rows


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
def advance_states(args: Any, layer: Any, counters: int, team: Any, storage: Any, stored: Any) -> None:
    """Update the states of a layer, and write the inputs of its last linear layer."""
    keep_apart()
    states = carray(pointer(layer.states, STATE_LAYER), 1)[0]
    num, stride, rows = states.num_projections, states.stride, args.num_tokens
    linears = carray(pointer(states.projections, LINEAR), (num + states.num_expansions,))
    inputs, outputs = operands(args, args.normed, args.hidden_size, stored), (args.qkv, stride)
    compute_linears(args, linears[:num], NOT_ADAPTED, counters, inputs, outputs, rows, storage)
    wait(args, team)
    if states.num_expansions > 0:
        inputs, outputs = (args.qkv, 4 * stride), (args.qkv + 4 * states.expanded_column, stride)
        compute_linears(args, linears[num:], NOT_ADAPTED, counters + 32, inputs, outputs, rows, storage)
        wait(args, team)
    first, end = share(args.num_tokens, team)
    _gather(args, states, states.inputs, 0, first, end)
    width = states.inputs.width
    inputs_at = states.inputs.values + 4 * first * width
    activate(states.activation, inputs_at, (end - first) * width, storage)
    _gather(args, states, states.steps, states.slopes, first, end)
    _gather(args, states, states.gate, 0, first, end)
    wait(args, team)
    if states.convolution != 0:
        call(states.convolution_kernel, (states.convolution,))
        wait(args, team)
    call(states.recurrence_kernel, (states.recurrence,))
    wait(args, team)
    if item_bytes(storage) < 4 and states.rounded_width != 0:
        narrow_rows(states.rounded, states.rounded_width, first, end, storage)
        wait(args, team)
    call(states.norm_kernel, (states.norm,))
    wait(args, team)
