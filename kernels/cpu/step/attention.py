"""Attention of a layer in a step's program, around the kernel of attention itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.blocks import quantize_vector
from quire.kernels.cpu.intrinsics import call, encode, exact, item_bytes, keep_apart, pointer
from quire.kernels.cpu.products.low_rank import LINEARS
from quire.kernels.cpu.rows import Activation, activate, narrow
from quire.kernels.cpu.step.added_layers import compute_added
from quire.kernels.cpu.step.latents import absorb, expand
from quire.kernels.cpu.step.linear_layers import compute_linears, operands, project_rows
from quire.kernels.cpu.step.records import COUNTERS_PER_LAYER
from quire.kernels.cpu.step.residual_stream import add_update, keep_rows
from quire.kernels.cpu.step.states import advance_states
from quire.kernels.cpu.step.team import share, wait
from quire.kernels.cpu.step.vectors import narrow_rows, rotate

_NUM_LINEARS, _OUTPUT = len(LINEARS), LINEARS.index("output")
_SIGMOID = int(Activation.SIGMOID)


@exact
def run_attention(args: Any, kept: Any, layer: Any, index: int, team: Any, storage: Any, stored: Any) -> None:
    """Compute the attention of a layer, or what has its place, and add it for the ``kept`` tokens."""
    keep_apart()
    size, attended_size = args.hidden_size, layer.output.in_features
    counters, at = args.counters + 8 * COUNTERS_PER_LAYER * index, _NUM_LINEARS * index
    if layer.states != 0:
        advance_states(args, layer, counters, team, storage, stored)
    else:
        project_rows(args, at, _OUTPUT, args.normed, size, team, storage)
        linears, outputs = (layer.query, layer.key, layer.value), (args.qkv, args.qkv_stride)
        inputs = operands(args, args.normed, size, stored)
        compute_linears(args, linears, at, counters, inputs, outputs, args.num_tokens, storage)
        wait(args, team)
        _attend(args, layer, counters, team, storage)
    drops_rows = kept.hidden != args.hidden
    if drops_rows:
        keep_rows(args, kept, attended_size, team)
    if item_bytes(storage) < 4:
        first, end = share(kept.num_tokens, team)
        narrow_rows(kept.attended, attended_size, first, end, storage)
    is_changed = item_bytes(storage) < 4 or drops_rows
    at, counter, rows = at + _OUTPUT, counters + 8, kept.attended
    compute_added(kept, layer.output, at, counter, rows, attended_size, is_changed, team, storage, stored)
    scale = layer.attention_scale
    add_update(kept, scale, layer.after_attention_norm, layer.mlp_norm, team, storage, stored)


@exact
def _attend(args: Any, layer: Any, counters: int, team: Any, storage: Any) -> None:
    """Write the step's keys and values, and attend over all blocks."""
    keep_apart()
    if layer.latent_dim:
        absorb(args, layer, counters, team, storage)
    else:
        _place_tokens(args, layer, team, storage)
    wait(args, team)
    if args.kv_format != 0:
        _quantize_tokens(args, layer, team)
        wait(args, team)
    call(args.attend, (layer.attention,))
    wait(args, team)
    if layer.latent_dim:
        expand(args, layer, counters, team, storage)
    elif layer.query_stride > args.head_dim:
        _gate_rows(args, layer, team, storage)
        wait(args, team)


@exact
def _place_tokens(args: Any, layer: Any, team: Any, storage: Any) -> None:
    """Rotate queries and keys; write keys and values into their blocks unless these have 8 bits."""
    keep_apart()
    positions = carray(pointer(args.positions, np.int64), (args.num_tokens,))
    slots = carray(pointer(layer.slots, np.int64), (args.num_tokens,))
    dim, num_bytes = args.head_dim, item_bytes(storage)
    first, end = share(args.num_tokens, team)
    for token in range(first, end):
        row = args.qkv + 4 * token * args.qkv_stride
        queries = args.queries + 4 * token * args.num_heads * dim
        for head in range(args.num_heads):
            query_at, output = row + 4 * head * layer.query_stride, queries + 4 * head * dim
            if layer.query_scale != 1.0:
                query = carray(pointer(query_at, np.float32), (dim,))
                for d in range(dim):
                    query[d] = narrow(query[d] * np.float32(layer.query_scale), storage)
            rotate(args, layer, query_at, output, dim, positions[token], layer.query_norm, storage)
        for head in range(args.num_kv_heads):
            at = row + 4 * (args.key_column + head * dim)
            rotate(args, layer, at, at, dim, positions[token], layer.key_norm, storage)
        if args.kv_format != 0 or slots[token] < 0:
            continue
        block, offset = slots[token] // args.block_size, slots[token] % args.block_size
        for head in range(args.num_kv_heads):
            key_at = layer.kv + num_bytes * (
                block * args.block_stride + head * args.head_stride + offset * dim
            )
            value_at = key_at + num_bytes * args.value_offset
            stored_key = carray(pointer(key_at, storage), (dim,))
            stored_value = carray(pointer(value_at, storage), (dim,))
            key = carray(pointer(row + 4 * (args.key_column + head * dim), np.float32), (dim,))
            value = carray(pointer(row + 4 * (args.value_column + head * dim), np.float32), (dim,))
            for d in range(dim):
                stored_key[d] = encode(key[d], storage)
                stored_value[d] = encode(value[d], storage)


@exact
def _quantize_tokens(args: Any, layer: Any, team: Any) -> None:
    """Write keys and values into 8-bit blocks: a thread writes all tokens of a head, in order.

    With latent attention, the latents and the rotated keys have the places of keys and values.
    """
    keep_apart()
    slots = carray(pointer(layer.slots, np.int64), (args.num_tokens,))
    for part in range(team.thread, 2 * args.num_kv_heads, team.num_threads):
        is_value, head = part // args.num_kv_heads, part % args.num_kv_heads
        dim = args.head_dim
        if layer.latent_dim:
            dim = dim - layer.latent_dim if is_value else layer.latent_dim
        column = (args.value_column if is_value else args.key_column) + head * dim
        for token in range(args.num_tokens):
            if slots[token] < 0:
                continue
            block, offset = slots[token] // args.block_size, slots[token] % args.block_size
            stored = layer.kv + (
                block * args.block_stride
                + is_value * args.value_offset
                + head * args.head_stride
                + offset * args.head_dim
            )
            scale = layer.kv_scales + 4 * (
                block * args.scale_block_stride + is_value * args.scale_value_offset + head
            )
            quantize_vector(
                carray(pointer(args.qkv + 4 * (token * args.qkv_stride + column), np.float32), (dim,)),
                carray(pointer(stored, np.uint8), (dim,)),
                carray(pointer(scale, np.float32), (1,)),
                offset,
                np.float32(args.scale_per_magnitude),
                args.kv_format == 1,
            )


@exact
def _gate_rows(args: Any, layer: Any, team: Any, storage: Any) -> None:
    """Multiply each head's result by the sigmoid of its gate."""
    keep_apart()
    dim = args.head_dim
    first, end = share(args.num_tokens, team)
    for head in range(first * args.num_heads, end * args.num_heads):
        token, number = head // args.num_heads, head % args.num_heads
        gates_at = args.qkv + 4 * (token * args.qkv_stride + number * layer.query_stride + dim)
        activate(_SIGMOID, gates_at, dim, storage)
        gates = carray(pointer(gates_at, np.float32), (dim,))
        results = carray(pointer(args.attended + 4 * head * dim, np.float32), (dim,))
        for d in range(dim):
            results[d] = narrow(narrow(results[d], storage) * gates[d], storage)
