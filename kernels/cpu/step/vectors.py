"""What a step's program does to single rows of float32 values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import exact, keep_apart, pointer
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
    is_interleaved = layer.is_interleaved
    for i in range(half):
        low, high = x[i], x[half + i]
        if is_interleaved:
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
def copy(source: int, target: int, length: int) -> None:
    values = carray(pointer(source, np.float32), (length,))
    copies = carray(pointer(target, np.float32), (length,))
    for i in range(length):
        copies[i] = values[i]
