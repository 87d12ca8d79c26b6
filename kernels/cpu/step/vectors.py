"""What a step's program does to single rows of float32 values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import copy_floats, exact, keep_apart, pointer
from quire.kernels.cpu.rows import narrow, normalize


@exact
def normalize_row(norm: Any, inputs: int, outputs: int, length: int, storage: Any) -> None:
    normalize(norm.kind, inputs, norm.weight, norm.bias, norm.epsilon, outputs, length, storage)


@exact
def rotate(
    args: Any, layer: Any, inputs: int, outputs: int, length: int, position: int, norm: Any, storage: Any
) -> None:
    """Normalize a query or key if the layer does so, and rotate it by its position."""
    keep_apart()
    rotary_dim = args.rotary_dim if layer.cosines else 0
    half = rotary_dim // 2
    if norm.kind != 0:
        normalize_row(norm, inputs, outputs, length, storage)
    elif layer.is_interleaved:
        _separate(inputs, outputs, half)
        copy(inputs + 4 * rotary_dim, outputs + 4 * rotary_dim, length - rotary_dim)
    elif inputs != outputs:
        copy(inputs, outputs, length)
    at = 4 * position * rotary_dim
    cosines = carray(pointer(layer.cosines + at, np.float32), (rotary_dim,))
    sines = carray(pointer(layer.sines + at, np.float32), (rotary_dim,))
    # LLVM computes in vectors what it finds to be apart: each half is read and written at its own address.
    low = carray(pointer(outputs, np.float32), (half,))
    high = carray(pointer(outputs + 4 * half, np.float32), (half,))
    for i in range(half):
        x, y = low[i], high[i]
        low[i] = narrow(narrow(x * cosines[i], storage) + narrow(-y * sines[i], storage), storage)
        high[i] = narrow(
            narrow(y * cosines[half + i], storage) + narrow(x * sines[half + i], storage), storage
        )


@exact
def _separate(inputs: int, outputs: int, half: int) -> None:
    """Write the first ones of pairs, and behind these the second ones."""
    pairs = carray(pointer(inputs, np.float32), (half, 2))
    halves = carray(pointer(outputs, np.float32), (2, half))
    for i in range(half):
        halves[0, i], halves[1, i] = pairs[i, 0], pairs[i, 1]


@exact
def narrow_rows(values: int, length: int, first: int, end: int, storage: Any) -> None:
    x = carray(pointer(values + 4 * first * length, np.float32), ((end - first) * length,))
    for i in range((end - first) * length):
        x[i] = narrow(x[i], storage)


@exact
def copy(source: int, target: int, length: int) -> None:
    copy_floats(np.int64(source), np.int64(target), np.int64(length))
