"""Paged attention in bfloat16 by tiles (AMX), in the order of sums of the instruction ``tdpbf16ps``.

It differs from ``attention`` in its products (see ``products.amx_product``), and in that rows are columns
here: scores are ``keys @ queries``, and outputs are ``values transposed @ weights``. Keys are thus tiles as
they lie in their blocks, and the softmax computes rows in the lanes of vectors, with a sum for each lane (see
``softmax_lanes``). Only values are transposed, once for all rows of a part.

    query    [head_dim / 2, rows] pairs     scores   [span, rows] float32
    values   [head_dim, span / 2] pairs     weights  [span / 2, rows] pairs
    total    [head_dim, rows] float32

A weight is rounded to bfloat16 before it multiplies a value, and the row sum has the rounded weights. Rows
that are unused fill up tiles, and a row's bits depend neither on them nor on the number of rows. Without
tiles, vectors multiply and add in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.attention_program import (
    ARGUMENTS,
    LOWEST,
    Array,
    find_parts,
    find_stage,
    first_seen,
    next_program,
    place_rows,
)
from quire.kernels.cpu.attention_tiles import part_tokens, span_blocks
from quire.kernels.cpu.intrinsics import (
    CACHE_LINE,
    SQUARE,
    compiled,
    encode,
    exact,
    exp,
    float_from_bits,
    in_lines,
    keep,
    multiply_add,
    pointer,
    transpose,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.amx_product import (
    CHAINS,
    TILE_INPUTS,
    TILE_ROW_BYTES,
    TILE_SIDE,
    TILES,
    add_tile_products,
    configure_tiles,
    has_tile_products,
    release_tiles,
)
from quire.kernels.cpu.products.bfloat16_product import PAIRS, flush_denormals, restore_denormals
from quire.kernels.cpu.products.packing import tiles_are_exact
from quire.kernels.cpu.softmax_lanes import LANES, scale_columns, weigh_keys

_STRIP = 4 * TILE_SIDE
"""Most rows that are computed together: one tile of keys or values multiplies them."""


def has_kernel(head_dim: int, block_size: int) -> bool:
    """Return whether keys and values of a shape are whole tiles."""
    span = span_blocks(block_size) * block_size
    return head_dim % TILE_INPUTS == 0 and block_size % TILE_SIDE == 0 and span % TILE_INPUTS == 0


@exact
def _multiply(
    total: int, left: int, right: int, num_tiles: int, strides: Any, num_columns: int, stored: Any
) -> None:
    """Add the products of a row of tiles and of 1 or 4 columns of tiles; see ``add_tile_products``."""
    if has_tile_products(stored):
        if num_columns == TILE_SIDE:
            add_tile_products(total, left, right, num_tiles, strides, 1, 1, stored)
        else:
            add_tile_products(total, left, right, num_tiles, strides, 1, 4, stored)
        return
    total_stride, left_stride, _, depth_stride, _, pair_stride = strides
    even, odd = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.float32)
    register = flush_denormals(CHAINS)
    for row in range(TILE_SIDE):
        sums = carray(pointer(total + row * total_stride, np.float32), (num_columns,))
        for tile in range(num_tiles):
            pairs = carray(pointer(left + row * left_stride + tile * TILE_ROW_BYTES, np.uint32), (TILE_SIDE,))
            even[:num_columns] = 0.0
            odd[:num_columns] = 0.0
            for pair in range(TILE_SIDE):
                x_even, x_odd = _halves(pairs[pair])
                weights_at = right + tile * depth_stride + pair * pair_stride
                weights = carray(pointer(weights_at, np.uint32), (num_columns,))
                for column in range(num_columns):
                    w_even, w_odd = _halves(weights[column])
                    even[column] = multiply_add(x_even, w_even, even[column])
                    odd[column] = multiply_add(x_odd, w_odd, odd[column])
            for column in range(num_columns):
                sums[column] += even[column] + odd[column]
    restore_denormals(register, CHAINS)


@compiled
def _halves(pair: int) -> Any:
    """Return both values of a pair as float32."""
    return float_from_bits(np.int32(pair << np.uint32(16))), float_from_bits(
        np.int32(pair & np.uint32(0xFFFF0000))
    )


@compiled
def _pair(first: float, second: float) -> Any:
    """Return two float32, rounded to bfloat16, as a pair."""
    return np.uint32(encode(first, np.uint16)) | np.uint32(encode(second, np.uint16)) << np.uint32(16)


@compiled
def _read_rows(
    inputs: Array, query: Array, first_row: int, num_tokens: int, group: int, head_dim: int
) -> None:
    for token in range(num_tokens):
        for head in range(group):
            for d in range(0, head_dim, 2):
                pair = _pair(inputs[token, head, d], inputs[token, head, d + 1])
                query[d // 2, first_row + token * group + head] = pair


@compiled
def _begin_rows(sinks: Array, best: Array, weight: Array, total: Array, num_rows: int, group: int) -> None:
    for row in range(num_rows):
        sink = sinks[row % group]
        best[row] = max(sink, LOWEST)
        weight[row] = 1.0 if sink > -np.inf else 0.0
    for d in range(total.shape[0]):
        for row in range(num_rows):
            total[d, row] = 0.0


@compiled
def _write_rows(
    total: Array, weight: Array, outputs: Array, first_row: int, num_tokens: int, group: int, head_dim: int
) -> None:
    for token in range(num_tokens):
        for head in range(group):
            row = first_row + token * group + head
            inverse = np.float32(1.0) / weight[row]
            for d in range(head_dim):
                outputs[token, head, d] = total[d, row] * inverse


@compiled
def _unpack_values(
    values_at: int, values: Array, first: int, block_size: int, head_dim: int, square: int
) -> None:
    """Write a block's values, transposed in pairs of tokens, to ``values`` from the pair ``first`` on."""
    for pair in range(0, block_size // 2, square):
        for d in range(0, head_dim, square):
            transpose(
                np.int64(values_at + 2 * (2 * pair * head_dim + d)),
                np.int64(head_dim),
                np.int64(values[d:, first + pair :].ctypes.data),
                np.int64(values.shape[1]),
                np.float32(1.0),
                PAIRS,
                square,
            )


@compiled
def _clear_values(values: Array, first_key: int, end_key: int) -> None:
    """Clear values before and after some keys: a NaN times weight 0 would still be NaN."""
    for d in range(values.shape[0]):
        for pair in range(first_key // 2):
            values[d, pair] = 0
        if end_key % 2 == 1:
            values[d, end_key // 2] &= np.uint32(0xFFFF)
        for pair in range(-(-end_key // 2), values.shape[1]):
            values[d, pair] = 0


@compiled
def _apply_softcap(scores: Array, num_keys: int, num_rows: int, scale: float, softcap: float) -> None:
    inverse = np.float32(1.0) / softcap
    for slot in range(num_keys):
        for row in range(num_rows):
            x = scores[slot, row] * scale * inverse
            # tanh(|x|) = 2 / (1 + e^-2|x|) - 1
            tanh = np.float32(2.0) / (np.float32(1.0) + exp(np.float32(-2.0) * abs(x))) - np.float32(1.0)
            scores[slot, row] = softcap * (tanh if x >= 0.0 else -tanh)


@compiled
def _running_softmax(
    scores: Array,
    weights: Array,
    bounds: Array,
    slopes: Array,
    best: Array,
    weight: Array,
    total: Array,
    scale: float,
    num_keys: int,
    first_row: int,
    num_rows: int,
) -> None:
    """Write the softmax weights of keys; rescale the output in ``total`` of rows whose max grows.

    ``best`` holds the max of each row and ``weight`` its sum; see ``weigh_keys`` for the rest.
    """
    strides = (np.int64(4 * scores.shape[1]), np.int64(4 * weights.shape[1]))
    for lane in range(0, num_rows, LANES):
        rows = (
            np.int64(best[first_row + lane :].ctypes.data),
            np.int64(weight[first_row + lane :].ctypes.data),
            np.int64(slopes[lane:].ctypes.data),
        )
        ends = (
            np.int64(bounds[0, lane:].ctypes.data),
            np.int64(bounds[1, lane:].ctypes.data),
            np.int64(bounds[2, lane:].ctypes.data),
        )
        scores_at, weights_at = (
            np.int64(scores[0, lane:].ctypes.data),
            np.int64(weights[0, lane:].ctypes.data),
        )
        if weigh_keys(scores_at, weights_at, rows, ends, np.int64(num_keys), strides, scale):
            totals_at, stride = (
                np.int64(total[0, first_row + lane :].ctypes.data),
                np.int64(4 * total.shape[1]),
            )
            scale_columns(totals_at, rows[2], np.int64(total.shape[0]), stride)


@compiled
def _attend_span(
    args: Any,
    kv_head: int,
    table: Array,
    base: int,
    first_key: int,
    end_key: int,
    slopes: Array,
    positions: Array,
    query: Array,
    best: Array,
    weight: Array,
    total: Array,
    buffers: Any,
    first_row: int,
    end_row: int,
    group: int,
    head_dim: int,
    block_size: int,
    span: int,
    square: int,
    stored: Any,
) -> None:
    """Attend over one span of blocks.

    Args:
        base: position of the span's first key.
        first_key, end_key: position of the first key that a row sees, and position after its last key.
        positions, query, best, weight, total: those of all rows of the tile.
        buffers: arrays whose content is not needed after the span.
    """
    scores, weights, values, bounds, row_slopes = buffers
    num_keys = min(span, end_key - base)
    first_block, num_blocks = max(0, first_key - base) // block_size, -(-num_keys // block_size)
    num_value_tiles = np.int64(-(-num_keys // TILE_INPUTS))
    head_at = args.kv + 2 * kv_head * args.head_stride
    for index in range(first_block, num_blocks):
        value_at = head_at + 2 * (
            args.block_stride * np.int64(table[base // block_size + index]) + args.value_offset
        )
        _unpack_values(value_at, values, index * block_size // 2, block_size, head_dim, square)
    _clear_values(values, first_block * block_size, num_keys)
    query_stride = total_stride = np.int64(4 * query.shape[1])
    column, row_bytes = np.int64(TILE_ROW_BYTES), np.int64(4 * _STRIP)
    key_strides = (row_bytes, np.int64(2 * head_dim), column, TILE_SIDE * query_stride, column, query_stride)
    value_strides = (total_stride, np.int64(2 * span), column, TILE_SIDE * row_bytes, column, row_bytes)
    for first in range(first_row, end_row, _STRIP):
        width = TILE_SIDE if end_row - first <= TILE_SIDE else _STRIP
        # Other columns of tiles have no row, and nothing reads what is in them.
        num_lanes = min(width, -(-(end_row - first) // LANES) * LANES)
        for slot in range(span):
            for row in range(num_lanes):
                scores[slot, row] = 0.0
        for slot in range(first_block * block_size, num_keys, TILE_SIDE):
            block = np.int64(table[(base + slot) // block_size])
            _multiply(
                np.int64(scores[slot:].ctypes.data),
                np.int64(head_at + 2 * (args.block_stride * block + slot % block_size * head_dim)),
                np.int64(query[:, first:].ctypes.data),
                np.int64(head_dim // TILE_INPUTS),
                key_strides,
                width,
                stored,
            )
        for row in range(num_lanes):
            position = positions[first + row]
            bounds[0, row] = min(span, max(0, first_seen(args, position) - base))
            bounds[1, row] = max(0, min(num_keys, position + 1 - base))
            bounds[2, row] = base - position
            row_slopes[row] = slopes[(first - first_row + row) % group]
        scale = args.scale
        if args.softcap > 0.0:
            _apply_softcap(scores, num_keys, num_lanes, scale, args.softcap)
            scale = np.float32(1.0)
        _running_softmax(
            scores,
            weights,
            bounds,
            row_slopes,
            best,
            weight,
            total,
            scale,
            TILE_INPUTS * num_value_tiles,
            first,
            num_lanes,
        )
        for d in range(0, head_dim, TILE_SIDE):
            _multiply(
                np.int64(total[d:, first:].ctypes.data),
                np.int64(values[d:].ctypes.data),
                np.int64(weights.ctypes.data),
                num_value_tiles,
                value_strides,
                width,
                stored,
            )


def kernel_for(head_dim: int, block_size: int, group: int) -> Any:
    """Compile the function that each thread runs; see ``attention.kernel_for``."""
    span = span_blocks(block_size) * block_size
    square = math.gcd(block_size // 2, SQUARE)
    # Products write whole strips of rows, and those of a tile's last part may begin at any row.
    max_rows = part_tokens(group, 2 * head_dim) * group + _STRIP
    stored = TILES if tiles_are_exact() else CHAINS

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        num_heads = args.num_heads
        memory = (
            np.zeros(head_dim // 2 * max_rows + CACHE_LINE, np.uint32),
            np.empty(head_dim * max_rows + CACHE_LINE, np.float32),
            np.zeros((2, max_rows + CACHE_LINE), np.float32),
            np.zeros(max_rows + CACHE_LINE, np.int64),
            np.zeros(span * _STRIP + CACHE_LINE, np.float32),
            np.empty(span // 2 * _STRIP + CACHE_LINE, np.uint32),
            np.zeros(head_dim * span // 2 + CACHE_LINE, np.uint32),
            np.empty(3 * _STRIP + CACHE_LINE, np.int32),
            np.empty(_STRIP + CACHE_LINE, np.float32),
        )
        query = in_lines(memory[0], (head_dim // 2, max_rows), np.uint32)
        total = in_lines(memory[1], (head_dim, max_rows), np.float32)
        best = in_lines(memory[2][0], (max_rows,), np.float32)
        weight = in_lines(memory[2][1], (max_rows,), np.float32)
        positions = in_lines(memory[3], (max_rows,), np.int64)
        buffers = (
            in_lines(memory[4], (span, _STRIP), np.float32),
            in_lines(memory[5], (span // 2, _STRIP), np.uint32),
            in_lines(memory[6], (head_dim, span // 2), np.uint32),
            in_lines(memory[7], (3, _STRIP), np.int32),
            in_lines(memory[8], (_STRIP,), np.float32),
        )
        # All tiles have one shape, since LLVM may choose another register for one that it sees to be free.
        configure_tiles(np.int64(TILE_SIDE), np.int64(TILE_SIDE), np.int64(TILE_ROW_BYTES), stored)
        while True:
            program = next_program(args)
            if program < 0:
                break
            kv_head = program % args.num_kv_heads
            parts, num_shared = find_parts(args, program)
            sinks = carray(pointer(args.sinks + 4 * kv_head * group, np.float32), (group,))
            slopes = carray(pointer(args.slopes + 4 * kv_head * group, np.float32), (group,))
            end_row: Any = place_rows(args, parts, positions, group)
            row: Any = np.int64(0)
            for part in range(parts.shape[0]):
                num_tokens = parts[part, 2] - parts[part, 1]
                rows_at = 4 * (parts[part, 1] * num_heads + kv_head * group) * head_dim
                inputs = carray(pointer(args.query + rows_at, np.float32), (num_tokens, num_heads, head_dim))
                _read_rows(inputs, query, row, num_tokens, group, head_dim)
                row += num_tokens * group
            _begin_rows(sinks, best, weight, total, end_row, group)
            for stage in range(parts.shape[0] + 1):
                own, first_row, first_span, end_span, first_key, end_key = find_stage(
                    args, parts, num_shared, positions, end_row, stage, group, span
                )
                table_at = args.block_tables + 4 * parts[own, 0] * args.table_width
                table = carray(pointer(table_at, np.int32), (args.table_width,))
                for span_index in range(first_span, end_span):
                    # Tokens before the span see none of its keys.
                    seeing = first_row + group * max(0, span_index * span - positions[first_row])
                    _attend_span(
                        args,
                        kv_head,
                        table,
                        span_index * span,
                        first_key,
                        end_key,
                        slopes,
                        positions,
                        query,
                        best,
                        weight,
                        total,
                        buffers,
                        seeing,
                        end_row,
                        group,
                        head_dim,
                        block_size,
                        span,
                        square,
                        stored,
                    )
                if stage > 0:
                    rows_at = 4 * (parts[own, 1] * num_heads + kv_head * group) * head_dim
                    num_tokens = (end_row - first_row) // group
                    outputs = carray(
                        pointer(args.output + rows_at, np.float32), (num_tokens, num_heads, head_dim)
                    )
                    _write_rows(total, weight, outputs, first_row, num_tokens, group, head_dim)
                    end_row = first_row
        release_tiles(stored)
        keep(memory)

    return compile_kernel(ARGUMENTS, kernel)
