"""Products of attention by ``vdpbf16ps``, for many rows and blocks of bfloat16; see ``bfloat16_product``.

A span's keys and values are packed into panels of pairs, as weights of linear layers are. Pairs of keys are
along the head's dimensions, those of values along the keys. Queries and softmax weights are rows of pairs.
The bits are those of products in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import TILE_COLUMNS, compiled, constant_of, pointer, transpose
from quire.kernels.cpu.products.bfloat16_product import PAIRS, prefers_pair_products
from quire.kernels.cpu.products.packed_product import MOST_TILE_ROWS, add_tile

Array = np.ndarray[Any, np.dtype[Any]]


def type_of_products(precision: Any, head_dim: int, block_size: int, span: int) -> Any:
    """Return ``PAIRS`` if products have pairs, else the type float32.

    Args:
        precision: the NumPy type of softmax weights; bfloat16 only if blocks have it, too.
        span: number of keys whose scores are computed together.
    """
    has_whole_panels = span % TILE_COLUMNS == 0 and head_dim % TILE_COLUMNS == 0
    is_fast = precision is np.uint16 and prefers_pair_products()
    return PAIRS if is_fast and has_whole_panels and block_size % 2 == 0 else np.float32


are_pairs = constant_of(types.boolean, lambda product: product == types.uint32)
"""Whether a type of products is ``PAIRS``, in a kernel."""


@compiled
def pair_keys(keys_at: int, panels: Array, first_column: int, block_size: int, square: int) -> None:
    """Write a block's keys into panels ``[columns / TILE_COLUMNS, head_dim / 2, TILE_COLUMNS]``.

    The pairs are as in the block, with the first value first; ``swap_halves`` brings them into their order.
    """
    num_pairs = panels.shape[1]
    for slot in range(0, block_size, square):
        panel, column = (first_column + slot) // TILE_COLUMNS, (first_column + slot) % TILE_COLUMNS
        for pair in range(0, num_pairs, square):
            transpose(
                np.int64(keys_at + 4 * (slot * num_pairs + pair)),
                np.int64(num_pairs),
                np.int64(panels[panel, pair:, column:].ctypes.data),
                np.int64(TILE_COLUMNS),
                np.float32(1.0),
                np.float32,
                square,
            )


@compiled
def swap_halves(panels: Array) -> None:
    """Swap both values of each pair."""
    words = panels.reshape(panels.size)
    for index in range(len(words)):
        words[index] = words[index] << np.uint32(16) | words[index] >> np.uint32(16)


@compiled
def pair_values(values_at: int, panels: Array, first_key: int, count: int, head_dim: int) -> None:
    """Write the first ``count`` values of a block into panels ``[head_dim / TILE_COLUMNS, span / 2, …]``."""
    values = carray(pointer(values_at, np.uint16), (count, head_dim))
    for panel in range(panels.shape[0]):
        first = panel * TILE_COLUMNS
        for key in range(0, count, 2):
            pairs = panels[panel, (first_key + key) // 2]
            for column in range(TILE_COLUMNS):
                pairs[column] = np.uint32(values[key, first + column]) << np.uint32(16)
            if key + 1 < count:
                for column in range(TILE_COLUMNS):
                    pairs[column] |= np.uint32(values[key + 1, first + column])


@compiled
def add_pair_products(total: Array, rows: Array, panels: Array, num_rows: int, product: Any) -> None:
    """Add ``rows @ panels`` to ``total``, in tiles of rows whose numbers differ by at most one.

    Args:
        total: float32 ``[num_rows or more, columns]``.
        rows: ``[num_rows or more, pairs]``.
        panels: ``[columns / TILE_COLUMNS, pairs, TILE_COLUMNS]``.
        num_rows: at least ``MOST_TILE_ROWS``.
        product: the type of products.
    """
    strides = (np.int64(total.shape[1]), np.int64(4 * rows.shape[1]), np.int64(0))
    num_tiles, depth = -(-num_rows // MOST_TILE_ROWS), np.int64(2 * panels.shape[1])
    for panel in range(panels.shape[0]):
        right = np.int64(panels[panel].ctypes.data)
        for tile in range(num_tiles):
            first, end = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            sums = np.int64(total[first:, panel * TILE_COLUMNS :].ctypes.data)
            left = np.int64(rows[first:].ctypes.data)
            add_tile(end - first, sums, left, right, depth, (right, np.int64(0)), strides, product)
