"""What the parts of a step's program share; see ``step``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import arrive, call, call_for_int, exact, keep_apart, pointer, read_shared
from quire.kernels.cpu.products.linear import UNIT, UnitCall
from quire.kernels.cpu.products.packed_product import FLOATS, input_form
from quire.kernels.cpu.rows import narrow, normalize

_SPINS = 10_000
"""How often a waiting thread checks the barrier before it offers its core to other threads.

If another process is busy, an offered core is lost for some milliseconds, a time slice of the scheduler. Next
to such a process, a step of one stream took 17 ms with 1,000, 8 ms with 10,000 and 5 ms with 100,000. But
with 100,000 it took 4.6 ms instead of 2 ms when both threads shared one core.
"""


@exact
def wait(args: Any, num_threads: int, phase: int) -> int:
    """Wait until all threads have ended a phase; return the next phase."""
    arrive(args.arrivals)
    target, spins = num_threads * (phase + 1), 0
    while read_shared(args.arrivals) < target:
        spins += 1
        if spins > _SPINS:
            call_for_int(args.yield_core)
    return phase + 1


@exact
def normalize_row(norm: Any, inputs: int, outputs: int, length: int, storage: Any) -> None:
    normalize(norm.kind, inputs, norm.weight, norm.bias, norm.epsilon, outputs, length, storage)


@exact
def compute_unit(
    linear: Any,
    unit: int,
    inputs: int,
    input_stride: int,
    output: int,
    output_stride: int,
    num_rows: int,
    storage: Any,
    item_bytes: int,
) -> None:
    """Compute one unit of columns of a linear layer, rounded to the model's dtype."""
    keep_apart()
    unit_call = UnitCall(
        inputs,
        input_stride,
        linear.weight,
        linear.in_features,
        unit,
        0,
        linear.in_features,
        output,
        output_stride,
        num_rows,
        linear.num_segments,
        linear.bias,
    )
    call(linear.multiply, unit_call)
    if item_bytes < 4:
        outputs = carray(pointer(output, np.float32), (num_rows, output_stride))
        for row in range(num_rows):
            for column in range(UNIT):
                outputs[row, column] = narrow(outputs[row, column], storage)


@exact
def rotate(
    args: Any, layer: Any, inputs: int, outputs: int, length: int, position: int, norm: Any, storage: Any
) -> None:
    """Normalize a query or key if the layer does so, and rotate it by its position."""
    keep_apart()
    if norm.kind != 0:
        normalize_row(norm, inputs, outputs, length, storage)
        inputs = outputs
    x = carray(pointer(inputs, np.float32), (length,))
    y = carray(pointer(outputs, np.float32), (length,))
    rotary_dim = args.rotary_dim if layer.cosines else 0
    half = rotary_dim // 2
    at = 4 * position * rotary_dim
    cosines = carray(pointer(layer.cosines + at, np.float32), (rotary_dim,))
    sines = carray(pointer(layer.sines + at, np.float32), (rotary_dim,))
    for i in range(half):
        low, high = x[i], x[half + i]
        if layer.is_interleaved:
            low, high = x[2 * i], x[2 * i + 1]
        y[i] = narrow(narrow(low * cosines[i], storage) + narrow(-high * sines[i], storage), storage)
        y[half + i] = narrow(
            narrow(high * cosines[half + i], storage) + narrow(low * sines[half + i], storage), storage
        )
    for i in range(rotary_dim, length):
        y[i] = x[i]


@exact
def narrow_rows(values: int, length: int, first: int, end: int, storage: Any) -> None:
    x = carray(pointer(values, np.float32), (end * length,))
    for i in range(first * length, end * length):
        x[i] = narrow(x[i], storage)


@exact
def operands(args: Any, rows: int, stored: Any) -> int:
    """Return the address of the inputs of a linear layer, which are the float32 ``rows`` or made of them."""
    if input_form(stored) == FLOATS:
        return rows
    operands: int = args.operands
    return operands


@exact
def copy(source: int, target: int, length: int) -> None:
    values = carray(pointer(source, np.float32), (length,))
    copies = carray(pointer(target, np.float32), (length,))
    for i in range(length):
        copies[i] = values[i]
