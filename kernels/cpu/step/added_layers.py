"""Linear layers whose outputs a step's program adds to the residual stream; processes may divide them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.exchange import EXCHANGE, add_slots, come, meet, piece_size, slot
from quire.kernels.cpu.intrinsics import call, exact, fetch_and_increment, keep_apart, pointer
from quire.kernels.cpu.products.low_rank import add_updates
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.stored_types import FLOATS, input_form
from quire.kernels.cpu.products.unit_product import ROWS, UnitCall, place_of
from quire.kernels.cpu.rows import narrow
from quire.kernels.cpu.step.linear_layers import compute_linears, encode_rows, operands, project_rows
from quire.kernels.cpu.step.team import share, wait
from quire.kernels.cpu.step.vectors import copy


@exact
def compute_added(
    args: Any,
    linear: Any,
    index: int,
    counter: int,
    rows: int,
    length: int,
    is_changed: bool,
    team: Any,
    storage: Any,
    stored: Any,
) -> None:
    """Write the output of a linear layer to ``update``; sum it over the processes.

    Args:
        index: that of its update of low rank.
        counter: see ``compute_linears``.
        rows, length: its float32 inputs.
        is_changed: whether this thread has changed its share of them since the last ``wait``.
    """
    keep_apart()
    encode_rows(args, rows, length, team, stored)
    if is_changed or input_form(stored) != FLOATS:
        wait(args, team)
    inputs = operands(args, rows, length, stored)
    if linear.borders != 0:
        _sum_processes(args, linear, index, counter, rows, length, inputs, team, storage)
        return
    project_rows(args, index, 1, rows, length, team, storage)
    linears, outputs = (linear, args.no_linear, args.no_linear), (args.update, args.update_stride)
    compute_linears(args, linears, index, counter, inputs, outputs, args.num_tokens, storage)
    wait(args, team)


@exact
def _sum_processes(
    args: Any,
    linear: Any,
    index: int,
    counter: int,
    rows: int,
    length: int,
    inputs: Any,
    team: Any,
    storage: Any,
) -> None:
    """Compute this process's part of a linear layer, and sum the parts of all."""
    keep_apart()
    exchange = carray(pointer(args.exchange, EXCHANGE), 1)[0]
    is_adapted = args.adapted.max_rank != 0
    round_number = args.last_round + 1 + (2 if is_adapted else 1) * linear.number
    if is_adapted:
        _project_gathered(args, exchange, linear, index, rows, length, round_number, team, storage)
        round_number += 1
    _sum_pieces(args, exchange, linear, counter, inputs, round_number)
    wait(args, team)
    if team.thread == 0:
        come(exchange)
    meet(exchange, round_number)
    (first, end), stride = share(args.num_tokens, team), args.update_stride
    add_slots(exchange, round_number, linear.borders, first, end, stride, args.update)
    # Only these sums are whole, so the bias is added and they are rounded here.
    sums = carray(pointer(args.update, np.float32), (end, stride))
    if linear.bias != 0:
        bias = carray(pointer(linear.bias, np.float32), (stride,))
        for row in range(first, end):
            for column in range(stride):
                sums[row, column] += bias[column]
    for row in range(first, end):
        for column in range(stride):
            sums[row, column] = narrow(sums[row, column], storage)
    if args.adapted.num_rows != 0:
        for unit in range(linear.num_units):
            output = args.update + 4 * (first * stride + unit * UNIT)
            add_updates(args.adapted, index, 0, (first, end - first), unit, output, stride, storage)


@exact
def _project_gathered(
    args: Any,
    exchange: Any,
    linear: Any,
    index: int,
    inputs: int,
    stride: int,
    round_number: int,
    team: Any,
    storage: Any,
) -> None:
    """Call ``project_rows`` for the inputs of all processes."""
    borders = carray(pointer(linear.borders, np.int64), (exchange.num_ranks + 1,))
    depth = linear.in_features // (borders[exchange.rank + 1] - borders[exchange.rank])
    length, own_column = depth * borders[exchange.num_ranks], depth * borders[exchange.rank]
    # The slots of all processes together have a row of inputs for each row of the step.
    gathered = slot(exchange, round_number, 0)
    rows = carray(pointer(args.adapted.rows, np.int64), (args.num_tokens,))
    first, end = share(args.adapted.num_rows, team)
    for number in range(first, end):
        row = rows[number]
        target = gathered + 4 * (row * length + own_column)
        copy(inputs + 4 * row * stride, target, linear.in_features)
    wait(args, team)
    if team.thread == 0:
        come(exchange)
    meet(exchange, round_number)
    project_rows(args, index, 1, gathered, length, team, storage)


@exact
def _sum_pieces(args: Any, exchange: Any, linear: Any, counter: int, inputs: Any, round_number: int) -> None:
    """Compute this process's partial sums of a linear layer, one for each of its pieces.

    They are rounded only after all processes' sums have been added.
    """
    keep_apart()
    borders = carray(pointer(linear.borders, np.int64), (exchange.num_ranks + 1,))
    own_first, end = borders[exchange.rank], borders[exchange.rank + 1]
    depth = linear.in_features // (end - own_first)
    num_programs = linear.num_units * -(-args.num_tokens // ROWS)
    first, first_program = own_first, 0
    output = slot(exchange, round_number, exchange.rank)
    program = np.int64(fetch_and_increment(counter))
    while first < end:
        size = piece_size(first, end)
        while program < first_program + num_programs:
            unit, row = place_of(program - first_program, args.num_tokens)
            unit_call = UnitCall(
                inputs[0] + row * inputs[1],
                inputs[1],
                linear.weight,
                linear.in_features,
                unit,
                (first - own_first) * depth,
                size * depth,
                output + 4 * (row * args.update_stride + unit * UNIT),
                args.update_stride,
                min(ROWS, args.num_tokens - row),
                size,
                0,
            )
            call(linear.multiply, unit_call)
            program = np.int64(fetch_and_increment(counter))
        first += size
        first_program += num_programs
        output += exchange.piece_bytes
