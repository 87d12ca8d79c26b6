"""Paged attention on the CPU, in Numba.

Each program takes one KV head of one run of query tokens, walks the sequence's block table and reads every
key and value once for all query heads of the group, with a running softmax (FlashAttention, Dao et al. 2022).

Threads: work is spread with ``prange`` over the threads that torch may use, and only where a step is large
enough to pay for waking them; workers of a local stack have one thread each and never do.

bfloat16 has no NumPy type: it is read through a uint16 view and widened to float32 by a shift.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange, set_num_threads

from quire.kernels.metadata import AttentionMetadata, HostMetadata

Array = np.ndarray[Any, np.dtype[Any]]

_QUERY_TILE = 16
"""Query tokens of one program: K and V of a block are read once for all of them."""

_MIN_PARALLEL_WORK = 1 << 16
"""Dot products of a step below which waking threads costs more than it saves."""


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``ops.paged_attention``."""
    host = metadata.host
    num_tokens, num_heads, head_dim = query.shape
    output = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32)
    sink_logits = np.full(num_heads, -np.inf, np.float32) if sinks is None else sinks.float().numpy()
    tiles = _tiles(host)
    work = int((host.seq_lens.astype(np.int64) * np.diff(host.query_starts)).sum()) * num_heads
    kernel = _attend_parallel if _use_threads(work) else _attend_serial
    kernel(
        query.float().contiguous().numpy(),
        _host_view(kv_layer),
        output.numpy(),
        host.block_tables,
        host.query_starts,
        host.seq_lens,
        tiles,
        np.float32(scale),
        np.int64(sliding_window or 0),
        np.float32(logit_softcap or 0.0),
        sink_logits,
        kv_layer.dtype == torch.bfloat16,
    )
    return output.to(query.dtype)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See ``ops.write_kv``."""
    _write(_host_view(key), _host_view(value), _host_view(kv_layer), slot_mapping.numpy())


def _host_view(tensor: torch.Tensor) -> Array:
    view: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return view


def _use_threads(work: int) -> bool:
    num_threads = torch.get_num_threads()
    if num_threads == 1 or work < _MIN_PARALLEL_WORK:
        return False
    if get_num_threads() != num_threads:
        set_num_threads(num_threads)
    return True


def _tiles(host: HostMetadata) -> Array:
    """Cut the new tokens into runs of one sequence: rows of (sequence, first token, last token + 1)."""
    num_new = np.diff(host.query_starts)
    if num_new.max(initial=0) <= 1:
        rows = np.flatnonzero(num_new)
        first = host.query_starts[rows]
        return np.stack([rows, first, first + 1], axis=1).astype(np.int64)
    tiles = [
        (row, first, min(first + _QUERY_TILE, host.query_starts[row + 1]))
        for row in range(len(num_new))
        for first in range(host.query_starts[row], host.query_starts[row + 1], _QUERY_TILE)
    ]
    return np.array(tiles, dtype=np.int64).reshape(-1, 3)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
def _load(
    kv_layer: Array, block: np.int64, which: int, head: int, tile: Array, count: int, is_bf16: bool
) -> None:
    """Copy ``count`` token rows of one head of a block into a float32 tile ``[block_size, head_dim]``."""
    head_dim = tile.shape[1]
    if is_bf16:
        bits = tile.view(np.uint32)
        for token in range(count):
            for d in range(head_dim):
                bits[token, d] = np.uint32(kv_layer[block, which, head, token, d]) << np.uint32(16)
    else:
        for token in range(count):
            for d in range(head_dim):
                tile[token, d] = kv_layer[block, which, head, token, d]


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
def _attend_tile(
    query: Array,
    kv_layer: Array,
    output: Array,
    block_table: Array,
    first_position: int,
    first: int,
    last: int,
    kv_head: int,
    group: int,
    scale: np.float32,
    window: np.int64,
    softcap: np.float32,
    sinks: Array,
    is_bf16: bool,
) -> None:
    """Attend with query tokens [first, last) of one sequence and the query heads of one KV head."""
    block_size, head_dim = kv_layer.shape[3], kv_layer.shape[4]
    num_rows = (last - first) * group
    keys = np.empty((block_size, head_dim), np.float32)
    values = np.empty((block_size, head_dim), np.float32)
    scores = np.empty(block_size, np.float32)
    total = np.zeros((num_rows, head_dim), np.float32)
    best = np.empty(num_rows, np.float32)
    weight = np.zeros(num_rows, np.float32)
    for row in range(num_rows):
        # A sink is a logit with no value: it takes part in the softmax and adds nothing.
        best[row] = sinks[kv_head * group + row % group]
        weight[row] = 1.0 if best[row] > -np.inf else 0.0
    last_position = first_position + (last - first) - 1
    first_key = max(0, first_position - window + 1) if window > 0 else 0
    for block_index in range(first_key // block_size, last_position // block_size + 1):
        block = np.int64(block_table[block_index])
        base = block_index * block_size
        # Slots past the last position hold what is not this sequence's: they are never read.
        count = min(block_size, last_position + 1 - base)
        _load(kv_layer, block, 0, kv_head, keys, count, is_bf16)
        _load(kv_layer, block, 1, kv_head, values, count, is_bf16)
        for row in range(num_rows):
            token = first + row // group
            head = kv_head * group + row % group
            position = first_position + row // group
            low = max(0, position - window + 1 - base) if window > 0 else 0
            high = min(count, position + 1 - base)
            if low >= high:
                continue
            peak = best[row]
            for slot in range(low, high):
                dot = np.float32(0.0)
                for d in range(head_dim):
                    dot += query[token, head, d] * keys[slot, d]
                dot *= scale
                if softcap > 0.0:
                    dot = softcap * np.tanh(dot / softcap)
                scores[slot] = dot
                peak = max(peak, dot)
            if peak > best[row]:
                shrink = np.exp(best[row] - peak)
                weight[row] *= shrink
                for d in range(head_dim):
                    total[row, d] *= shrink
                best[row] = peak
            for slot in range(low, high):
                share = np.exp(scores[slot] - peak)
                weight[row] += share
                for d in range(head_dim):
                    total[row, d] += share * values[slot, d]
    for row in range(num_rows):
        inverse = np.float32(1.0) / weight[row]
        for d in range(head_dim):
            output[first + row // group, kv_head * group + row % group, d] = total[row, d] * inverse


def _attend(
    query: Array,
    kv_layer: Array,
    output: Array,
    block_tables: Array,
    query_starts: Array,
    seq_lens: Array,
    tiles: Array,
    scale: np.float32,
    window: np.int64,
    softcap: np.float32,
    sinks: Array,
    is_bf16: bool,
) -> None:
    num_kv_heads = kv_layer.shape[2]
    group = query.shape[1] // num_kv_heads
    for program in prange(tiles.shape[0] * num_kv_heads):
        tile, kv_head = program // num_kv_heads, program % num_kv_heads
        row, first, last = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        # The sequence's last token has position seq_len - 1.
        first_position = seq_lens[row] - (query_starts[row + 1] - first)
        _attend_tile(
            query,
            kv_layer,
            output,
            block_tables[row],
            first_position,
            first,
            last,
            kv_head,
            group,
            scale,
            window,
            softcap,
            sinks,
            is_bf16,
        )


_attend_serial = njit(cache=True, nogil=True)(_attend)
_attend_parallel = njit(cache=True, nogil=True, parallel=True)(_attend)


@njit(cache=True, nogil=True)
def _write(key: Array, value: Array, kv_layer: Array, slot_mapping: Array) -> None:
    block_size = kv_layer.shape[3]
    for token in range(slot_mapping.shape[0]):
        block, offset = slot_mapping[token] // block_size, slot_mapping[token] % block_size
        for head in range(kv_layer.shape[2]):
            for d in range(kv_layer.shape[4]):
                kv_layer[block, 0, head, offset, d] = key[token, head, d]
                kv_layer[block, 1, head, offset, d] = value[token, head, d]
