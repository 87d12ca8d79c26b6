"""Attention of some rows over one span of blocks, with a running softmax; see ``attention``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.attention_pairs import (
    add_pair_products,
    are_pairs,
    pair_keys,
    pair_values,
    swap_halves,
)
from quire.kernels.cpu.attention_program import LOWEST, Array, first_seen
from quire.kernels.cpu.intrinsics import (
    TILE_COLUMNS,
    TILE_ROWS,
    add_product,
    compiled,
    exp,
    pointer,
    transpose,
    widen,
)
from quire.kernels.cpu.products.bfloat16_product import encode_pairs
from quire.kernels.cpu.rows import narrow
from quire.kernels.cpu.vector_loops import add_lanes, largest

FEW_ROWS = 32
"""Most rows for which values are read in place; with more rows it is faster to widen them first."""


@compiled
def _unpack_keys(
    keys_at: int,
    scale: float,
    keys: Array,
    first_column: int,
    block_size: int,
    head_dim: int,
    first: int,
    end: int,
    storage: Any,
    item_bytes: int,
    square: int,
) -> None:
    """Write elements [first, end) of a block's keys into the key buffer, transposed one square at a time.

    Args:
        keys_at: address of the block's keys.
        scale: factor of 8-bit keys.
        keys: the buffer ``[head_dim, columns]``.
        first_column: column of the block's first key.
        square: side of the squares; it divides block_size, first and end.
    """
    for slot in range(0, block_size, square):
        for d in range(first, end, square):
            transpose(
                np.int64(keys_at + item_bytes * (slot * head_dim + d)),
                np.int64(head_dim),
                np.int64(keys[d:, first_column + slot :].ctypes.data),
                np.int64(keys.shape[1]),
                np.float32(scale),
                storage,
                square,
            )


@compiled
def _unpack_values(
    block_values: Array, scale: float, values: Array, first_row: int, count: int, value_dim: int
) -> None:
    """Write the first ``count`` values of one block, widened, into ``values`` from ``first_row`` on."""
    for slot in range(count):
        for d in range(value_dim):
            values[first_row + slot, d] = widen(block_values[slot, d]) * scale


@compiled
def _add_products(
    total: Array,
    left: Array,
    right: Array,
    num_rows: int,
    depth: int,
    first_column: int,
    end_column: int,
    width: int,
    coming: Any,
    step: int,
) -> None:
    """Add ``left @ right`` to some columns of ``total``, one tile of rows and columns at a time.

    The arrays have whole tiles of rows. ``coming`` has two addresses. Each iteration of the inner loop over
    ``depth`` prefetches ``step`` bytes from both.
    """
    strides = (np.int64(total.shape[1]), np.int64(left.shape[1]), np.int64(right.shape[1]))
    for row in range(0, num_rows, TILE_ROWS):
        for column in range(first_column, end_column, width):
            add_product(
                np.int64(total[row:, column:].ctypes.data),
                np.int64(left[row:].ctypes.data),
                np.int64(right[:, column:].ctypes.data),
                np.int64(depth),
                strides,
                np.float32(1.0),
                coming,
                TILE_ROWS,
                width,
                np.float32,
                step,
            )


@compiled
def _add_block_values(
    total: Array,
    scores: Array,
    values_at: int,
    scale: float,
    num_rows: int,
    first_column: int,
    count: int,
    head_dim: int,
    value_dim: int,
    width: int,
    storage: Any,
    item_bytes: int,
) -> None:
    """Add the weighted values of one block, read in place, to ``total``.

    ``first_column`` is the column of ``scores`` that weights the block's first value. A value is the first
    ``value_dim`` elements of a row of ``head_dim``.
    """
    strides = (np.int64(total.shape[1]), np.int64(scores.shape[1]), np.int64(head_dim))
    for row in range(0, num_rows, TILE_ROWS):
        for column in range(0, value_dim, width):
            add_product(
                np.int64(total[row:, column:].ctypes.data),
                np.int64(scores[row:, first_column:].ctypes.data),
                np.int64(values_at + item_bytes * column),
                np.int64(count),
                strides,
                np.float32(scale),
                (np.int64(0), np.int64(0)),
                TILE_ROWS,
                width,
                storage,
                0,
            )


@compiled
def _scale_scores(
    scores: Array, row: int, span: int, scale: float, softcap: float, slope: float, distance: int
) -> None:
    """Scale a row's scores, and apply the soft cap and ALiBi.

    Args:
        distance: from the row's position to the first key's.
    """
    for slot in range(span):
        scores[row, slot] *= scale
    if softcap > 0.0:
        inverse = np.float32(1.0) / softcap
        for slot in range(span):
            x = scores[row, slot] * inverse
            # tanh(|x|) = 2 / (1 + e^-2|x|) - 1
            tanh = np.float32(2.0) / (np.float32(1.0) + exp(np.float32(-2.0) * abs(x))) - np.float32(1.0)
            scores[row, slot] = softcap * (tanh if x >= 0.0 else -tanh)
    if slope != 0.0:
        for slot in range(span):
            scores[row, slot] += slope * np.float32(distance + slot)


@compiled
def _running_softmax(
    scores: Array,
    row: int,
    low: int,
    high: int,
    best: Array,
    weight: Array,
    total: Array,
    span: int,
    value_dim: int,
    precision: Any,
) -> None:
    """Replace the scores [low, high) of a row by softmax weights, and all its other scores by zero.

    ``best`` holds the row max, and ``weight`` the row sum in ``SUM_LANES`` parts. If the row max grows, the
    row sum and the output in ``total`` are rescaled. ``span`` is a multiple of 16. The weights are rounded to
    the NumPy type ``precision``.
    """
    if low >= high:
        for slot in range(span):
            scores[row, slot] = 0.0
        return
    for slot in range(low):
        scores[row, slot] = LOWEST
    for slot in range(high, span):
        scores[row, slot] = LOWEST
    peak = largest(np.int64(scores[row:].ctypes.data), np.int64(span), best[row])
    shrink = np.float32(1.0)
    if peak > best[row]:
        shrink = exp(best[row] - peak)
        for d in range(value_dim):
            total[row, d] *= shrink
        best[row] = peak
    for slot in range(span):
        scores[row, slot] = narrow(exp(scores[row, slot] - peak), precision)
    # ``exp`` never returns less than the smallest normal number, but keys that a row does not see must add
    # exactly nothing.
    for slot in range(low):
        scores[row, slot] = 0.0
    for slot in range(high, span):
        scores[row, slot] = 0.0
    add_lanes(np.int64(weight[row:].ctypes.data), np.int64(scores[row:].ctypes.data), np.int64(span), shrink)


@compiled
def _scale_of(scales_at: int, block: int, block_stride: int) -> np.float32:
    """Return the factor of a block's 8-bit keys or values."""
    scale: np.float32 = carray(pointer(scales_at + 4 * block_stride * block, np.float32), (1,))[0]
    return scale


@compiled
def attend_span(
    args: Any,
    kv_head: int,
    table: Array,
    base: int,
    first_key: int,
    end_key: int,
    slopes: Array,
    positions: Array,
    query: Array,
    scores: Array,
    keys: Array,
    values: Array,
    best: Array,
    weight: Array,
    total: Array,
    num_rows: int,
    group: int,
    head_dim: int,
    latent_dim: int,
    block_size: int,
    span: int,
    storage: Any,
    item_bytes: int,
    square: int,
    block_columns: int,
    value_columns: int,
    step: int,
    precision: Any,
    product: Any,
    query_pairs: Array,
    weight_pairs: Array,
    key_panels: Array,
    value_panels: Array,
) -> None:
    """Attend over one span of blocks.

    Args:
        base: position of the span's first key.
        first_key, end_key: position of the first key that a row sees, and position after its last key.
        positions: of the rows.
        latent_dim: elements of a latent; 0 if keys and values lie apart.
        scores, keys, values: buffers whose content is not needed after the span.
        step: number of bytes to prefetch for each product of a key.
        precision: the NumPy type to which softmax weights are rounded.
        product: the type of the products of many rows; those of pairs read ``query_pairs`` and write
            ``weight_pairs``, ``key_panels`` and ``value_panels``, see ``attention_pairs``.
    """
    nothing = (np.int64(0), np.int64(0))
    is_scaled = item_bytes == 1
    head_at = args.kv + item_bytes * kv_head * args.head_stride
    block_stride, value_offset = item_bytes * args.block_stride, item_bytes * args.value_offset
    # Latents have the first scale, as keys have, and rotated keys the second.
    value_dim = latent_dim if latent_dim > 0 else head_dim
    scales_at = args.kv_scales + (0 if latent_dim > 0 else 4 * kv_head)
    second_scales_at = scales_at + 4 * args.scale_value_offset
    value_scales_at = scales_at if latent_dim > 0 else second_scales_at
    has_few_rows = num_rows <= FEW_ROWS
    has_pairs = are_pairs(product) and not has_few_rows
    # Slots after the last position may hold another sequence's data and are never read.
    num_keys = min(span, end_key - base)
    num_blocks = -(-num_keys // block_size)
    scores[:num_rows] = 0.0
    # Blocks before the window are not read either, since they may have been freed.
    first_block = max(0, first_key - base) // block_size
    for index in range(first_block, num_blocks):
        entry = base // block_size + index
        block = np.int64(table[entry])
        key_at = head_at + block_stride * block
        value_at = key_at + value_offset
        slot = index * block_size
        if has_pairs:
            pair_keys(key_at, key_panels, slot, block_size, square)
            pair_values(value_at, value_panels, slot, min(block_size, num_keys - slot), head_dim)
            continue
        key_scale = _scale_of(scales_at, block, args.scale_block_stride) if is_scaled else np.float32(1.0)
        end = value_dim if is_scaled else head_dim
        _unpack_keys(key_at, key_scale, keys, slot, block_size, head_dim, 0, end, storage, item_bytes, square)
        if end < head_dim:
            scale = _scale_of(second_scales_at, block, args.scale_block_stride)
            _unpack_keys(
                key_at, scale, keys, slot, block_size, head_dim, end, head_dim, storage, item_bytes, square
            )
        if has_few_rows:
            next_entry = min(entry + 1, (end_key - 1) // block_size)
            next_key_at = head_at + block_stride * np.int64(table[next_entry])
            _add_products(
                scores,
                query,
                keys,
                num_rows,
                head_dim,
                slot,
                slot + block_size,
                block_columns,
                (np.int64(value_at), np.int64(next_key_at)),
                step,
            )
        else:
            value_scale = np.float32(1.0)
            if is_scaled:
                value_scale = _scale_of(value_scales_at, block, args.scale_block_stride)
            block_values = carray(pointer(value_at, storage), (block_size, head_dim))
            count = min(block_size, num_keys - slot)
            _unpack_values(block_values, value_scale, values, slot, count, value_dim)
    # Unused values are cleared: a NaN from an earlier sequence times weight 0 would still be NaN.
    if has_pairs:
        swap_halves(key_panels)
        value_panels[:, : first_block * block_size // 2] = 0
        value_panels[:, (num_keys + 1) // 2 :] = 0
        add_pair_products(scores, query_pairs, key_panels, num_rows, product)
    elif not has_few_rows:
        values[: first_block * block_size] = 0.0
        values[num_keys:] = 0.0
        _add_products(scores, query, keys, num_rows, head_dim, 0, scores.shape[1], TILE_COLUMNS, nothing, 0)
    for row in range(num_rows):
        position = positions[row]
        slope = slopes[row % group]
        _scale_scores(scores, row, span, args.scale, args.softcap, slope, base - position)
        low = min(span, max(0, first_seen(args, position) - base))
        high = max(0, min(num_keys, position + 1 - base))
        _running_softmax(scores, row, low, high, best, weight, total, scores.shape[1], value_dim, precision)
    if has_few_rows:
        for index in range(first_block, num_blocks):
            block = np.int64(table[base // block_size + index])
            value_scale = np.float32(1.0)
            if is_scaled:
                value_scale = _scale_of(value_scales_at, block, args.scale_block_stride)
            _add_block_values(
                total,
                scores,
                head_at + block_stride * block + value_offset,
                value_scale,
                num_rows,
                index * block_size,
                min(block_size, num_keys - index * block_size),
                head_dim,
                value_dim,
                value_columns,
                storage,
                item_bytes,
            )
    elif has_pairs:
        encode_pairs(np.int64(scores.ctypes.data), np.int64(weight_pairs.ctypes.data), num_rows * span)
        add_pair_products(total, weight_pairs, value_panels, num_rows, product)
    else:
        _add_products(total, scores, values, num_rows, span, 0, value_dim, value_columns, nothing, 0)
