"""Weights of linear layers in 8 bits, whose inputs are quantized to 8 bits too; see ``integer_product``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import (
    GROUP,
    STORAGE,
    TILE_COLUMNS,
    bits_of_float,
    exact,
    fetch_and_increment,
    float_from_bits,
    pointer,
    widen,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.amx_product import (
    INTEGER_FEATURES,
    INTEGER_TILES,
    TILE_SIDE,
    may_use_tiles,
)
from quire.kernels.cpu.products.integer_product import (
    INPUT_BYTES,
    INPUTS,
    INTEGERS,
    LEAST_PEAK,
    PANEL_TRAILER,
    ROW_HEADER,
)
from quire.kernels.cpu.products.packed_weight import (
    UNIT,
    Allocate,
    EncodedWeight,
    in_own_memory,
    num_padded_panels,
)
from quire.kernels.cpu.products.packing import have_same_sums
from quire.kernels.cpu.products.panels import ARGUMENTS, fill_panels, padded_parts
from quire.kernels.cpu.products.rounding import read_group, write_words


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers of float32 rows, as float32, and their scales ``[..., 1]``.

    A value that is not finite makes the scale of its row NaN, and the integers zeros.
    """
    peaks = rows.abs().amax(-1, keepdim=True)
    is_finite, counts = peaks.isfinite(), peaks >= LEAST_PEAK
    # torch computes 127 / peaks as a multiplication by the reciprocal, which rounds twice.
    inverses = torch.full_like(peaks, 127) / peaks
    integers = (rows * torch.where(counts, inverses, 0)).round()
    scales = torch.where(is_finite, torch.where(counts, peaks, 0) / 127, torch.nan)
    return torch.where(is_finite, integers, 0), scales


@dataclass(frozen=True)
class IntegerWeight(EncodedWeight):
    """A weight in integers with one scale for each output.

    Attributes:
        panels: uint8 ``[out_features / TILE_COLUMNS, bytes of a panel]``.
        by_tiles: whether tiles multiply it with more than a few rows, in processes that may use them. Only
            vectors do so in all others.
    """

    by_tiles: bool

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        # Linux permits tiles to each process by itself, and another one may have packed the weight.
        return INTEGER_TILES if self.by_tiles and may_use_tiles(INTEGER_FEATURES) else INTEGERS

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs to 8 bits."""
        return True

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of inputs as uint8 ``[num_rows, ROW_HEADER + INPUT_BYTES * in_features]``."""
        integers, scales = quantize_rows(rows.float())
        octets = (integers + 128).to(torch.uint8)
        if INPUT_BYTES == 2:
            pairs = octets.unflatten(-1, (-1, INPUTS // 2, 2)).transpose(-1, -2)
            octets = pairs.flatten(1).to(torch.int16).view(torch.uint8)
        operands = torch.zeros((len(rows), ROW_HEADER + octets.shape[1]), dtype=torch.uint8)
        operands[:, ROW_HEADER:] = octets
        operands[:, :4] = scales.view(torch.uint8)
        return operands

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the dequantized weight, ``[*indices.shape, in_features]``."""
        panel, column = indices // TILE_COLUMNS, indices % TILE_COLUMNS
        words = self.panels[:, :-PANEL_TRAILER].view(len(self.panels), -1, TILE_COLUMNS, INPUTS)
        scales = self.panels[:, -PANEL_TRAILER:].view(torch.float32)[panel, column]
        integers = words.view(torch.int8)[panel, :, column].flatten(-2)
        return (integers * scales[..., None]).to(self.unpacked_dtype)


def quantize_to_integers(weight: torch.Tensor, allocate: Allocate = in_own_memory) -> IntegerWeight:
    """Quantize a weight ``[out_features, in_features]`` of any float dtype.

    Args:
        weight: the weight, whose number of inputs is a multiple of ``GROUP``.
        allocate: allocates the packed weight.
    """
    return _quantize(weight, allocate, tiles_are_exact())


@cache
def tiles_are_exact() -> bool:
    """Return whether this process may use tiles, and their products have the bits of vectors."""
    if not may_use_tiles(INTEGER_FEATURES):
        return False
    shape = (2 * TILE_SIDE + 1 + UNIT, 3 * GROUP)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    inputs, weight = values.split([2 * TILE_SIDE + 1, UNIT])
    tiles = _quantize(weight, in_own_memory, by_tiles=True)
    return have_same_sums(inputs, tiles, replace(tiles, by_tiles=False))


def _quantize(weight: torch.Tensor, allocate: Allocate, by_tiles: bool) -> IntegerWeight:
    out_features, in_features = weight.shape
    panel_bytes = in_features * TILE_COLUMNS + PANEL_TRAILER
    panels = allocate((num_padded_panels(out_features), panel_bytes), torch.uint8)
    for part, target in padded_parts(weight, panels):
        fill_panels(_kernel(STORAGE[weight.dtype]), part, target)
    return IntegerWeight(panels, out_features, in_features, weight.dtype, by_tiles)


@exact
def _largest_magnitude(row: Any, stored: Any) -> np.float32:
    """Return the largest magnitude of a row of stored values. A NaN counts as larger than all numbers."""
    largest = np.int32(0)
    for value in row:
        largest = max(largest, bits_of_float(widen(value)) & np.int32(0x7FFFFFFF))
    magnitude: np.float32 = float_from_bits(largest)
    return magnitude


@cache
def _kernel(stored: Any) -> Any:
    """Compile the function that each thread runs: it quantizes the next panel until none is left."""
    item_bytes = np.dtype(stored).itemsize

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        group = np.empty((GROUP, TILE_COLUMNS), np.float32)
        divisors = np.empty(TILE_COLUMNS, np.float32)
        while True:
            panel = np.int64(fetch_and_increment(args.next_panel))
            if panel >= args.num_panels:
                break
            weight = args.weight + item_bytes * panel * TILE_COLUMNS * args.in_features
            target = args.panels + panel * (args.in_features * TILE_COLUMNS + PANEL_TRAILER)
            trailer = target + args.in_features * TILE_COLUMNS
            scales = carray(pointer(trailer, np.float32), (TILE_COLUMNS,))
            sums = carray(pointer(trailer + scales.nbytes, np.int32), (TILE_COLUMNS,))
            rows = carray(pointer(weight, stored), (TILE_COLUMNS, args.in_features))
            for column in range(TILE_COLUMNS):
                scale = _largest_magnitude(rows[column], stored) / np.float32(127)
                scales[column], sums[column] = scale, 0
                divisors[column] = scale if scale > 0.0 else np.float32(1.0)
            for first in range(0, args.in_features, GROUP):
                read_group(weight + item_bytes * first, args.in_features, group, stored, item_bytes)
                to = np.int64(target + first * TILE_COLUMNS)
                write_words(np.int64(group.ctypes.data), np.int64(divisors.ctypes.data), to, 8)
                words = carray(pointer(to, np.int32), (GROUP // INPUTS, TILE_COLUMNS))
                for index in range(len(words)):
                    for column in range(TILE_COLUMNS):
                        for shift in range(0, 32, 8):
                            sums[column] += np.int32(words[index, column] << shift) >> 24

    return compile_kernel(ARGUMENTS, kernel)


def pack_integers(integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> IntegerWeight:
    """Pack int8 ``[out_features, in_features]`` with float32 scales ``[out_features]``.

    Args:
        dtype: the model's dtype.
    """
    out_features, in_features = integers.shape
    num_panels = num_padded_panels(out_features)
    panels = torch.zeros((num_panels, in_features * TILE_COLUMNS + PANEL_TRAILER), dtype=torch.uint8)
    for panel in range(-(-out_features // TILE_COLUMNS)):
        own = slice(panel * TILE_COLUMNS, (panel + 1) * TILE_COLUMNS)
        padding = (0, (panel + 1) * TILE_COLUMNS - min(own.stop, out_features))
        values = torch.nn.functional.pad(integers[own], (0, 0, *padding))
        words = values.view(TILE_COLUMNS, -1, INPUTS).transpose(0, 1)
        panels[panel, :-PANEL_TRAILER] = words.reshape(-1).view(torch.uint8)
        factors = torch.nn.functional.pad(scales[own], padding).view(torch.int32)
        trailer = torch.stack((factors, values.sum(-1).to(torch.int32)))
        panels[panel, -PANEL_TRAILER:] = trailer.view(-1).view(torch.uint8)
    return IntegerWeight(panels, out_features, in_features, dtype, tiles_are_exact())
