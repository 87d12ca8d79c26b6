"""Transposes weights into panels, on all threads.

Two values of 16 bits are moved as one word of 32 bits, so that a square of words fits into registers. The
words of ``TILE_COLUMNS`` rows are transposed in a buffer in the first-level cache, and from there written in
the order in which a product reads them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import SQUARE, TILE_COLUMNS, fetch_and_increment, pointer, transpose
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.panels import ARGUMENTS, fill_panels

WORDS, HALVES, SWAPPED = range(3)
"""Orders of the words: as they are, two rows of halves, or with swapped halves."""


def can_transpose(in_features: int, itemsize: int) -> bool:
    """Return whether rows of this many values consist of whole squares of words."""
    return itemsize in (2, 4) and in_features * itemsize % (4 * SQUARE) == 0


def transpose_panels(weight: torch.Tensor, panels: torch.Tensor, order: int) -> None:
    """Write whole panels of a weight ``[num_panels * TILE_COLUMNS, in_features]``.

    Args:
        weight: the weight, whose rows are whole squares of words.
        panels: the result, ``[num_panels or more, in_features, TILE_COLUMNS]`` of the weight's dtype.
        order: WORDS for values of 32 bits; for those of 16 bits HALVES, or SWAPPED, which writes pairs of
            inputs as ``[in_features / 2, TILE_COLUMNS, 2]``, the second one first.
    """
    fill_panels(_kernel(order), weight, panels)


@cache
def _kernel(order: int) -> Any:
    """Compile the function that each thread runs: it transposes the next panel until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        num_words = np.int64(args.in_features if order == WORDS else args.in_features // 2)
        square = np.empty((SQUARE, TILE_COLUMNS), np.uint32)
        while True:
            panel = np.int64(fetch_and_increment(args.next_panel))
            if panel >= args.num_panels:
                break
            source = args.weight + 4 * panel * TILE_COLUMNS * num_words
            target = args.panels + 4 * panel * TILE_COLUMNS * num_words
            for first in range(0, num_words, SQUARE):
                for column in range(0, TILE_COLUMNS, SQUARE):
                    at = np.int64(source + 4 * (column * num_words + first))
                    to = np.int64(square.ctypes.data + 4 * column)
                    transpose(at, num_words, to, TILE_COLUMNS, np.float32(1.0), np.float32, SQUARE)
                start = target + 4 * first * TILE_COLUMNS
                if order == HALVES:
                    halves = carray(pointer(start, np.uint16), (SQUARE, 2, TILE_COLUMNS))
                    for k in range(SQUARE):
                        for column in range(TILE_COLUMNS):
                            halves[k, 0, column] = np.uint16(square[k, column])
                            halves[k, 1, column] = np.uint16(square[k, column] >> np.uint32(16))
                else:
                    words = carray(pointer(start, np.uint32), (SQUARE, TILE_COLUMNS))
                    for k in range(SQUARE):
                        for column in range(TILE_COLUMNS):
                            word = square[k, column]
                            if order == SWAPPED:
                                word = word << np.uint32(16) | word >> np.uint32(16)
                            words[k, column] = word

    return compile_kernel(ARGUMENTS, kernel)
