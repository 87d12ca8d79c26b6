"""Linear layers in a step's program: the form of their inputs, their products, and updates of low rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import call, exact, fetch_and_increment, item_bytes, keep_apart, pointer
from quire.kernels.cpu.products.bfloat16_product import encode_pairs
from quire.kernels.cpu.products.group_product import encode_groups
from quire.kernels.cpu.products.integer_product import encode_integers
from quire.kernels.cpu.products.low_rank import add_updates, project
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.stored_types import BY_GROUP, BY_ROW, FLOATS, PAIRED, input_form, row_bytes
from quire.kernels.cpu.products.unit_product import ROWS, UnitCall, place_of
from quire.kernels.cpu.rows import narrow
from quire.kernels.cpu.step.team import share, wait

NOT_ADAPTED = -1


@exact
def encode_rows(args: Any, rows: int, length: int, team: Any, stored: Any) -> None:
    """Write float32 rows in the form in which products read them, unless that is float32."""
    first, end = share(args.num_tokens, team)
    source, target = rows + 4 * first * length, args.operands + first * row_bytes(length, stored)
    if input_form(stored) == PAIRED:
        encode_pairs(source, target, (end - first) * length)
    elif input_form(stored) == BY_GROUP:
        encode_groups(source, target, (end - first) * length)
    elif input_form(stored) == BY_ROW:
        for row in range(end - first):
            encode_integers(source + 4 * row * length, target + row * row_bytes(length, stored), length)


@exact
def operands(args: Any, rows: int, length: int, stored: Any) -> tuple[int, int]:
    """Return the inputs of a linear layer, which are float32 ``rows`` or made of them: address and stride."""
    return rows if input_form(stored) == FLOATS else args.operands, row_bytes(length, stored)


@exact
def compute_unit(linear: Any, unit: int, inputs: Any, outputs: Any, num_rows: int, storage: Any) -> None:
    """Compute one unit of columns of a linear layer, rounded to the model's dtype.

    Args:
        inputs, outputs: the address of the first row, and how many bytes lie between rows of inputs, and
            values between rows of outputs.
    """
    keep_apart()
    (at, stride), (output, output_stride), size = inputs, outputs, linear.in_features
    segments, bias = linear.num_segments, linear.bias
    unit_call = UnitCall(
        at, stride, linear.weight, size, unit, 0, size, output, output_stride, num_rows, segments, bias
    )
    call(linear.multiply, unit_call)
    if item_bytes(storage) < 4:
        values = carray(pointer(output, np.float32), (num_rows, output_stride))
        for row in range(num_rows):
            for column in range(UNIT):
                values[row, column] = narrow(values[row, column], storage)


@exact
def compute_linears(
    args: Any,
    linears: Any,
    first_linear: int,
    counter: int,
    inputs: Any,
    outputs: Any,
    num_rows: int,
    storage: Any,
) -> None:
    """Compute linear layers whose outputs lie side by side.

    Args:
        linears: an array or a tuple of ``LINEAR``.
        first_linear: the index of their first update of low rank, or ``NOT_ADAPTED``.
        counter: the address of a counter of units, with which threads divide the work.
        inputs, outputs: see ``compute_unit``.
    """
    keep_apart()
    num_units = 0
    for slot in range(len(linears)):
        num_units += linears[slot].num_units
    while True:
        program = np.int64(fetch_and_increment(counter))
        if program >= num_units * -(-num_rows // ROWS):
            break
        unit, first = place_of(program, num_rows)
        slot, own_unit = 0, unit
        while own_unit >= linears[slot].num_units:
            own_unit -= linears[slot].num_units
            slot += 1
        linear, count = linears[slot], min(ROWS, num_rows - first)
        source = inputs[0] + first * inputs[1] + 4 * linear.input_column
        output = outputs[0] + 4 * (first * outputs[1] + unit * UNIT)
        compute_unit(linear, own_unit, (source, inputs[1]), (output, outputs[1]), count, storage)
        if args.adapted.num_rows != 0 and first_linear != NOT_ADAPTED:
            rows, index = (first, count), first_linear + slot
            add_updates(args.adapted, index, slot, rows, own_unit, output, outputs[1], storage)


@exact
def project_rows(
    args: Any, first_linear: int, num_linears: int, inputs: int, stride: int, team: Any, storage: Any
) -> None:
    """Compute what the updates of low rank of some linear layers add up."""
    if args.adapted.num_rows != 0:
        project(args.adapted, first_linear, num_linears, inputs, stride, team, storage)
        wait(args, team)
