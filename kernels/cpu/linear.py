"""Linear layers on the CPU, with weights that are packed once.

Decoding one sequence is limited by the speed of memory, and oneDNN reads the weights of a single row at half
of it. Here all weights of a tile lie next to each other in the order in which they are read.

The sum of each output runs over the inputs in order, with fused multiplications. So its bits depend neither
on the number of rows, nor on the number of threads, nor on the width of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, from_dtype, types  # type: ignore[attr-defined]

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import (
    TILE_COLUMNS,
    exact,
    fetch_and_increment,
    keep_apart,
    pointer,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.packed_product import add_rows_product, bytes_per_input, quantized_bits
from quire.kernels.cpu.storage import STORAGE

UNIT = 64
"""Output columns that a thread computes at a time; outputs are padded to a multiple of it."""
_PANELS = UNIT // TILE_COLUMNS
_PAIR = min(2, _PANELS)
ROWS = 96
"""Most rows that a thread computes at a time, so that they stay in its cache."""
_FEW_ROWS = 2
"""Rows whose sums of one panel would leave most registers empty."""
_MOST_TILE_ROWS = 6
_DEPTH = 2048
"""Inputs after which a thread turns to the next rows, so that the tile's weights stay in its cache."""
_MIN_THREADED_WORK = 1 << 19
"""Multiplications below which waking up threads costs more time than it saves."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight as ``[out_features / TILE_COLUMNS, in_features, TILE_COLUMNS]``, padded with zeros."""

    panels: torch.Tensor
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight before it was packed."""
        return self.panels.dtype

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return STORAGE[self.panels.dtype]

    @property
    def num_units(self) -> int:
        """How many times ``UNIT`` columns the padded output has."""
        return self.panels.shape[0] // _PANELS

    @property
    def unit_bytes(self) -> int:
        """Bytes of the weights of ``UNIT`` columns."""
        return _PANELS * self.panels[0].nbytes

    def unpack(self) -> torch.Tensor:
        """Return the weight ``[out_features, in_features]``."""
        return self.panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the weight, ``[*indices.shape, in_features]``."""
        return self.panels[indices // TILE_COLUMNS, :, indices % TILE_COLUMNS]


def num_padded_panels(out_features: int) -> int:
    """Return the number of panels of a weight whose outputs are padded to whole units."""
    return -(-out_features // UNIT) * _PANELS


def pack(weight: torch.Tensor) -> PackedWeight:
    """Pack a weight ``[out_features, in_features]`` of a dtype in ``STORAGE`` with at least 16 bits."""
    out_features, in_features = weight.shape
    num_panels = num_padded_panels(out_features)
    panels = torch.zeros((num_panels, in_features, TILE_COLUMNS), dtype=weight.dtype)
    num_whole = out_features // TILE_COLUMNS
    whole = weight[: num_whole * TILE_COLUMNS].view(num_whole, TILE_COLUMNS, in_features)
    panels[:num_whole] = whole.transpose(1, 2)
    if rest := out_features - num_whole * TILE_COLUMNS:
        panels[num_whole, :, :rest] = weight[num_whole * TILE_COLUMNS :].T
    return PackedWeight(panels, out_features, in_features)


_FIELDS = (
    "inputs",
    "weight",
    "bias",
    "output",
    "next_unit",
    "num_rows",
    "in_features",
    "input_stride",
    "output_stride",
    "num_units",
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])


def linear(inputs: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias``.

    Args:
        inputs: ``[..., in_features]``, in the dtype of the weight.
        weight: the packed weight.
        bias: float32 ``[num_units * UNIT]``.
    """
    rows = inputs.reshape(-1, weight.in_features).float().contiguous()
    output = torch.empty((rows.shape[0], weight.num_units * UNIT))
    counter = np.zeros(1, np.int64)
    arguments = np.array(
        [
            (
                rows.data_ptr(),
                weight.panels.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                output.data_ptr(),
                counter.ctypes.data,
                rows.shape[0],
                weight.in_features,
                weight.in_features,
                output.shape[1],
                weight.num_units,
            )
        ],
        dtype=_ARGUMENTS,
    )
    work = rows.shape[0] * weight.in_features * weight.out_features
    num_threads = torch.get_num_threads() if work >= _MIN_THREADED_WORK else 1
    threads.run(_kernel(weight.stored).address, arguments.ctypes.data, num_threads)
    result = output[:, : weight.out_features].to(inputs.dtype)
    return result.reshape(*inputs.shape[:-1], weight.out_features)


@exact
def unit_offset(unit: int, in_features: int, stored: Any) -> int:
    """Return the bytes from the beginning of a packed weight to a unit."""
    num_bytes: int = unit * _PANELS * in_features * bytes_per_input(stored)
    return num_bytes


@exact
def multiply_unit(
    inputs: int,
    input_stride: int,
    weight: int,
    in_features: int,
    bias: int,
    output: int,
    output_stride: int,
    num_rows: int,
    stored: Any,
) -> None:
    """Compute ``UNIT`` output columns of up to ``ROWS`` rows.

    Args:
        inputs, weight, bias, output: addresses of the first row, of the unit's weights, of its bias (0 if
            there is none) and of its first output; all but the weight are float32.
        input_stride, output_stride: elements from one row to the next.
        stored: the NumPy type of the weight, in ``STORAGE`` or ``QUANTIZED``.
    """
    keep_apart()
    outputs = carray(pointer(output, np.float32), (num_rows, output_stride))
    for row in range(num_rows):
        for column in range(UNIT):
            outputs[row, column] = 0.0
    # A few rows read the weights once, from memory; many rows read them again from the cache.
    step = _DEPTH if num_rows > 2 * _MOST_TILE_ROWS else in_features
    for first in range(0, in_features, step):
        depth = min(step, in_features - first)
        _add_rows(
            inputs + 4 * first,
            input_stride,
            weight + bytes_per_input(stored) * first,
            in_features,
            depth,
            output,
            output_stride,
            num_rows,
            stored,
        )
    if bias != 0:
        addends = carray(pointer(bias, np.float32), (UNIT,))
        for row in range(num_rows):
            for column in range(UNIT):
                outputs[row, column] += addends[column]


@exact
def _add_rows(
    inputs: int,
    input_stride: int,
    weight: int,
    in_features: int,
    depth: int,
    output: int,
    output_stride: int,
    num_rows: int,
    stored: Any,
) -> None:
    """Add the products of ``depth`` inputs, in tiles that fill the registers."""
    if num_rows > _FEW_ROWS:
        _add_tiles(inputs, input_stride, weight, in_features, depth, output, output_stride, num_rows, stored)
    else:
        _add_few_rows(
            inputs, input_stride, weight, in_features, depth, output, output_stride, num_rows, stored
        )


@exact
def _add_tiles(
    inputs: int,
    input_stride: int,
    weight: int,
    in_features: int,
    depth: int,
    output: int,
    output_stride: int,
    num_rows: int,
    stored: Any,
) -> None:
    """Add the products of rows in tiles of one panel, whose numbers of rows differ by one at most."""
    panel_bytes = bytes_per_input(stored) * in_features
    strides = (np.int64(output_stride), np.int64(input_stride), np.int64(panel_bytes))
    count = np.int64(depth)
    num_tiles = -(-num_rows // _MOST_TILE_ROWS)
    for panel in range(_PANELS):
        right = np.int64(weight + panel * panel_bytes)
        for tile in range(num_tiles):
            first, end = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            total = np.int64(output + 4 * (first * output_stride + panel * TILE_COLUMNS))
            left = np.int64(inputs + 4 * first * input_stride)
            if end - first == 6:
                add_rows_product(total, left, right, count, strides, 6, 1, stored)
            elif end - first == 5:
                add_rows_product(total, left, right, count, strides, 5, 1, stored)
            elif end - first == 4:
                add_rows_product(total, left, right, count, strides, 4, 1, stored)
            else:
                add_rows_product(total, left, right, count, strides, 3, 1, stored)


@exact
def _add_few_rows(
    inputs: int,
    input_stride: int,
    weight: int,
    in_features: int,
    depth: int,
    output: int,
    output_stride: int,
    num_rows: int,
    stored: Any,
) -> None:
    """Add the products of one or two rows, in tiles of several panels."""
    panel_bytes = bytes_per_input(stored) * in_features
    strides = (np.int64(output_stride), np.int64(input_stride), np.int64(panel_bytes))
    left, count = np.int64(inputs), np.int64(depth)
    # The sums of one row leave enough registers for four panels of floats, but only for two of integers.
    if num_rows == 1 and quantized_bits(stored) == 0:
        total, right = np.int64(output), np.int64(weight)
        add_rows_product(total, left, right, count, strides, 1, _PANELS, stored)
        return
    for panel in range(0, _PANELS, _PAIR):
        total = np.int64(output + 4 * panel * TILE_COLUMNS)
        right = np.int64(weight + panel * panel_bytes)
        if num_rows == 1:
            add_rows_product(total, left, right, count, strides, 1, _PAIR, stored)
        else:
            add_rows_product(total, left, right, count, strides, 2, _PAIR, stored)


@cache
def _kernel(stored: Any) -> Any:
    """Compile the function that each thread runs: it takes the next unit until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        num_chunks = -(-args.num_rows // ROWS)
        while True:
            program = np.int64(fetch_and_increment(args.next_unit))
            if program >= args.num_units * num_chunks:
                break
            unit, first = program % args.num_units, program // args.num_units * ROWS
            multiply_unit(
                args.inputs + 4 * first * args.input_stride,
                args.input_stride,
                args.weight + unit_offset(unit, args.in_features, stored),
                args.in_features,
                args.bias + 4 * unit * UNIT if args.bias else 0,
                args.output + 4 * (first * args.output_stride + unit * UNIT),
                args.output_stride,
                min(ROWS, args.num_rows - first),
                stored,
            )

    signature = types.void(types.CPointer(from_dtype(_ARGUMENTS)))
    return compile_kernel(signature, kernel, error_model="numpy")
