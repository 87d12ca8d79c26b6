"""Paged attention on the CPU.

A program computes a tile for one KV head. A tile consists of parts, and a part of consecutive new tokens of
one sequence. The rows of a part are its tokens times the query heads of the group, so every key and value is
read once for all of them. The program loops over the sequence's block table, one span of blocks at a time,
with a running softmax (FlashAttention, Dao et al., 2022). It transposes keys into a buffer that fits into the
CPU's cache. Scores and outputs are matrix products.

With many rows, as in prefill, arithmetic is the limit: products run over whole spans, and values are widened
once, or packed with the keys in pairs of bfloat16 (see ``attention_pairs``). With few rows, as in decode,
memory is the limit: values are read in place, and each step of the product with a block's keys prefetches a
part of the block's values and of the next block's keys. Prefetching a whole block at once would stall, since
a core can have only a few memory requests in flight.

Sequences that begin with the same blocks share a tile. A program first attends over the shared blocks with
the rows of all its parts, so it reads and transposes each key once. Then it attends over the other blocks of
each part (Hydragen, Juravsky et al., 2024; ChunkAttention, Ye et al., 2024).

In all cases a row's sums run in the order of its keys, in spans counted from the table's first block, and
keys that the row does not see add nothing. A token therefore gets the same bits in a decode step, in a chunk
and in a whole prompt.

With latent attention all query heads share the rows of the blocks, and a value is the beginning of its key's
row. Some heads at a time form a group, so one token of one sequence can still use several threads.

A kernel is compiled for each (head_dim, block_size, group, dtype, latent_dim), since loops of constant length
are unrolled. Numba caches it on disk. Everything else is an argument. Models with the arithmetic of AMX have
another kernel, see ``attention_amx``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, types  # type: ignore[attr-defined]

from quire.kernels.cpu import attention_amx, attention_pairs, threads
from quire.kernels.cpu.attention_pairs import (
    add_pair_products,
    are_pairs,
    pair_keys,
    pair_values,
    swap_halves,
)
from quire.kernels.cpu.attention_program import (
    ARGUMENTS,
    ARGUMENTS_TYPE,
    LOWEST,
    Array,
    find_parts,
    find_stage,
    first_seen,
    next_program,
    place_rows,
)
from quire.kernels.cpu.attention_tiles import AttentionShape, make_parts, make_tiles, part_tokens, span_blocks
from quire.kernels.cpu.intrinsics import (
    CACHE_LINE,
    SQUARE,
    STORAGE,
    SUM_LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    add_lanes,
    add_product,
    compiled,
    copy_floats,
    exp,
    in_lines,
    keep,
    largest,
    pointer,
    sum_powers,
    transpose,
    widen,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.amx_product import AMX_BFLOAT16
from quire.kernels.cpu.products.bfloat16_product import (
    PAIRS,
    encode_pairs,
    flush_denormals,
    restore_denormals,
)
from quire.kernels.cpu.rows import narrow

_FEW_ROWS = 32
"""Most rows for which values are read in place; with more rows it is faster to widen them first."""
_MOST_LATENT_HEADS = 16
"""Most query heads of a group with latent attention."""
_MIN_THREADED_WORK = 1 << 16
"""With fewer multiplications in a step than this, waking up threads costs more time than it saves."""


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    is_chunked: bool = False,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    latent_dim: int | None = None,
    max_new_tokens: int | None = None,
    arithmetic: str | None = None,
) -> torch.Tensor:
    """Compute attention over paged blocks on the CPU; see ``ops.paged_attention``."""
    num_tokens, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = kv_layer.shape
    block_stride, value_offset, head_stride = kv_layer.stride()[:3]
    if latent_dim is not None:
        num_kv_heads, value_offset, head_stride = num_heads // latent_group(num_heads), 0, 0
    group = num_heads // num_kv_heads
    starts = query_starts.numpy()
    num_new = starts[1:] - starts[:-1]
    parts, tiles = make_tiles(
        make_parts(starts, num_new, part_tokens(group, head_dim + (latent_dim or head_dim))),
        block_tables.numpy(),
        starts,
        seq_lens.numpy(),
        AttentionShape(block_size, num_heads, num_kv_heads),
        torch.get_num_threads(),
    )
    query32 = query.float().contiguous()
    output = torch.empty((num_tokens, num_heads, latent_dim or head_dim))
    sink_logits = np.full(num_heads, -np.inf, np.float32) if sinks is None else sinks.float().numpy()
    slopes = np.zeros(num_heads, np.float32) if alibi_slopes is None else alibi_slopes.float().numpy()
    scale_block_stride, scale_value_offset = (0, 0) if kv_scales is None else kv_scales.stride()[:2]
    counter = np.zeros(1, np.int64)
    addresses = (
        query32.data_ptr(),
        kv_layer.data_ptr(),
        output.data_ptr(),
        block_tables.data_ptr(),
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        parts.ctypes.data,
        tiles.ctypes.data,
        sink_logits.ctypes.data,
        slopes.ctypes.data,
        0 if kv_scales is None else kv_scales.data_ptr(),
        counter.ctypes.data,
    )
    integers = (
        len(tiles) * num_kv_heads,
        num_kv_heads,
        num_heads,
        block_tables.shape[1],
        block_stride,
        value_offset,
        head_stride,
        scale_block_stride,
        scale_value_offset,
        sliding_window or 0,
        is_chunked,
    )
    arguments = np.array([(*addresses, *integers, scale, logit_softcap or 0.0)], dtype=ARGUMENTS)
    kernel = kernel_for(head_dim, block_size, group, STORAGE[kv_layer.dtype], latent_dim, arithmetic)
    work = int(num_new @ seq_lens.numpy()) * num_heads * head_dim
    num_threads = torch.get_num_threads() if work >= _MIN_THREADED_WORK else 1
    threads.run(kernel.address, arguments.ctypes.data, num_threads)
    return output.to(query.dtype)


def latent_group(num_heads: int) -> int:
    """Return how many query heads a program computes with latent attention."""
    return max(each for each in range(1, _MOST_LATENT_HEADS + 1) if num_heads % each == 0)


@compiled
def _read_rows(inputs: Array, query: Array, num_tokens: int, group: int, head_dim: int) -> None:
    for token in range(num_tokens):
        target = np.int64(query[token * group :].ctypes.data)
        copy_floats(np.int64(inputs[token:].ctypes.data), target, np.int64(group * head_dim))


@compiled
def _begin_rows(
    sinks: Array, best: Array, weight: Array, total: Array, num_rows: int, group: int, value_dim: int
) -> None:
    for row in range(num_rows):
        # A sink is a logit without a value: it counts in the row sum and adds nothing to the output.
        sink = sinks[row % group]
        best[row] = max(sink, LOWEST)
        weight[row] = 0.0
        weight[row, 0] = 1.0 if sink > -np.inf else 0.0
        for d in range(value_dim):
            total[row, d] = 0.0


@compiled
def _write_rows(
    total: Array, weight: Array, outputs: Array, num_tokens: int, group: int, value_dim: int
) -> None:
    for token in range(num_tokens):
        for head in range(group):
            row = token * group + head
            lanes_at = np.int64(weight[row:].ctypes.data)
            inverse = np.float32(1.0) / sum_powers(lanes_at, np.int64(SUM_LANES), np.float32(0.0), 1)
            for d in range(value_dim):
                outputs[token, head, d] = total[row, d] * inverse


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
    has_few_rows = num_rows <= _FEW_ROWS
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


@cache
def kernel_for(
    head_dim: int,
    block_size: int,
    group: int,
    storage: Any,
    latents: int | None = None,
    arithmetic: str | None = None,
) -> Any:
    """Compile the function that each thread runs: it takes the next program until none is left.

    Args:
        arithmetic: the order of sums. ``AMX_BFLOAT16`` needs bfloat16 in whole tiles and no latents; all
            other blocks have the order of ``FLOAT32``, as without an arithmetic. With bfloat16 blocks and no
            latents, softmax weights are rounded to bfloat16 in both.
    """
    is_tiled = arithmetic == AMX_BFLOAT16 and storage is STORAGE[torch.bfloat16] and latents is None
    if is_tiled and attention_amx.has_kernel(head_dim, block_size):
        return attention_amx.kernel_for(head_dim, block_size, group)
    latent_dim, value_dim = latents or 0, latents or head_dim
    span = span_blocks(block_size) * block_size
    score_columns = -(-span // TILE_COLUMNS) * TILE_COLUMNS
    value_columns = min(value_dim & -value_dim, TILE_COLUMNS)
    # Products write whole tiles of rows, and the products of a tile's last part may begin at any row.
    most_tokens = part_tokens(group, head_dim + value_dim)
    max_rows = -(-most_tokens * group // TILE_ROWS) * TILE_ROWS + TILE_ROWS
    item_bytes = np.dtype(storage).itemsize
    square = math.gcd(block_size, head_dim, value_dim, SQUARE)
    block_columns = min(block_size & -block_size, TILE_COLUMNS)
    step = block_size * item_bytes
    rounds_weights = storage is STORAGE[torch.bfloat16] and latents is None
    precision = storage if rounds_weights else np.float32
    product = attention_pairs.type_of_products(precision, head_dim, block_size, span)
    num_pairs = max_rows if product is PAIRS else 0
    panels = (score_columns // TILE_COLUMNS, value_dim // TILE_COLUMNS)

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        num_heads = args.num_heads
        memory = (
            np.zeros(max_rows * head_dim + CACHE_LINE, np.float32),
            np.empty(max_rows * value_dim + CACHE_LINE, np.float32),
            np.zeros(max_rows * score_columns + CACHE_LINE, np.float32),
            np.zeros(head_dim * score_columns + CACHE_LINE, np.float32),
            np.zeros(span * value_dim + CACHE_LINE, np.float32),
            np.empty(max_rows + CACHE_LINE, np.float32),
            np.empty(max_rows * SUM_LANES + CACHE_LINE, np.float32),
            np.empty(max_rows + CACHE_LINE, np.int64),
            np.empty(num_pairs * head_dim // 2 + CACHE_LINE, np.uint32),
            np.empty(num_pairs * score_columns // 2 + CACHE_LINE, np.uint32),
        )
        query = in_lines(memory[0], (max_rows, head_dim), np.float32)
        total = in_lines(memory[1], (max_rows, value_dim), np.float32)
        scores = in_lines(memory[2], (max_rows, score_columns), np.float32)
        keys = in_lines(memory[3], (head_dim, score_columns), np.float32)
        values = in_lines(memory[4], (span, value_dim), np.float32)
        best = in_lines(memory[5], (max_rows,), np.float32)
        weight = in_lines(memory[6], (max_rows, SUM_LANES), np.float32)
        positions = in_lines(memory[7], (max_rows,), np.int64)
        query_pairs = in_lines(memory[8], (max_rows, head_dim // 2), np.uint32)
        weight_pairs = in_lines(memory[9], (max_rows, score_columns // 2), np.uint32)
        # Pairs need half as much room as float32.
        key_panels = in_lines(memory[3], (panels[0], head_dim // 2, TILE_COLUMNS), np.uint32)
        value_panels = in_lines(memory[4], (panels[1], span // 2, TILE_COLUMNS), np.uint32)
        register = flush_denormals(storage)
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
                _read_rows(inputs, query[row:], num_tokens, group, head_dim)
                row += num_tokens * group
            if are_pairs(product) and end_row > _FEW_ROWS:
                query_at, pairs_at = np.int64(query.ctypes.data), np.int64(query_pairs.ctypes.data)
                encode_pairs(query_at, pairs_at, end_row * head_dim)
            _begin_rows(sinks, best, weight, total, end_row, group, value_dim)
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
                        positions[seeing:],
                        query[seeing:],
                        scores,
                        keys,
                        values,
                        best[seeing:],
                        weight[seeing:],
                        total[seeing:],
                        end_row - seeing,
                        group,
                        head_dim,
                        latent_dim,
                        block_size,
                        span,
                        storage,
                        item_bytes,
                        square,
                        block_columns,
                        value_columns,
                        step,
                        precision,
                        product,
                        query_pairs[seeing:],
                        weight_pairs,
                        key_panels,
                        value_panels,
                    )
                if stage > 0:
                    rows_at = 4 * (parts[own, 1] * num_heads + kv_head * group) * value_dim
                    num_tokens = (end_row - first_row) // group
                    shape = (num_tokens, num_heads, value_dim)
                    outputs = carray(pointer(args.output + rows_at, np.float32), shape)
                    _write_rows(total[first_row:], weight[first_row:], outputs, num_tokens, group, value_dim)
                    end_row = first_row
        restore_denormals(register, storage)
        keep(memory)

    signature = types.void(types.CPointer(ARGUMENTS_TYPE))
    return compile_kernel(signature, kernel, error_model="numpy")
