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
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu import attention_amx, attention_pairs, threads
from quire.kernels.cpu.attention_pairs import (
    are_pairs,
)
from quire.kernels.cpu.attention_program import (
    ARGUMENTS,
    LOWEST,
    Array,
    find_parts,
    find_stage,
    next_program,
    place_rows,
)
from quire.kernels.cpu.attention_span import FEW_ROWS, attend_span
from quire.kernels.cpu.attention_tiles import AttentionShape, make_parts, make_tiles, part_tokens, span_blocks
from quire.kernels.cpu.intrinsics import (
    CACHE_LINE,
    SQUARE,
    STORAGE,
    TILE_COLUMNS,
    TILE_ROWS,
    compiled,
    copy_floats,
    in_lines,
    keep,
    pointer,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.amx_product import AMX_BFLOAT16
from quire.kernels.cpu.products.bfloat16_product import (
    PAIRS,
    encode_pairs,
    flush_denormals,
    restore_denormals,
)
from quire.kernels.cpu.vector_loops import SUM_LANES, sum_powers

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
            if are_pairs(product) and end_row > FEW_ROWS:
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
                    attend_span(
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

    return compile_kernel(ARGUMENTS, kernel)
