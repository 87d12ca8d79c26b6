"""Latent attention in a step's program, before and after attention itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import (
    encode,
    exact,
    fetch_and_increment,
    item_bytes,
    keep_apart,
    pointer,
)
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.unit_product import ROWS, place_of
from quire.kernels.cpu.rows import Activation, activate, narrow
from quire.kernels.cpu.step.linear_layers import compute_unit
from quire.kernels.cpu.step.team import share, wait
from quire.kernels.cpu.step.vectors import narrow_rows, normalize_row, rotate

_SIGMOID = int(Activation.SIGMOID)


@exact
def absorb(args: Any, layer: Any, counters: int, team: Any, storage: Any) -> None:
    """Write latents, and compute the queries that attend to them."""
    keep_apart()
    queries, stride = args.qkv, args.qkv_stride
    query_dim = layer.key_heads.in_features + args.head_dim - layer.latent_dim
    if layer.query_up.num_units:
        first, end = share(args.num_tokens, team)
        for token in range(first, end):
            at = queries + 4 * token * stride
            normalize_row(layer.query_norm, at, at, layer.query_up.in_features, storage)
        wait(args, team)
        width = args.num_heads * query_dim
        inputs, outputs = (queries, stride, np.int64(0)), (args.operands, width, np.int64(0))
        _multiply_heads(args, layer.query_up, 1, counters + 32, inputs, outputs, width, storage)
        wait(args, team)
        queries, stride = args.operands, width
    _place_latents(args, layer, queries, stride, team, storage)
    inputs, num_heads = (queries, stride, query_dim), args.num_heads
    outputs = (args.queries, num_heads * args.head_dim, args.head_dim)
    _multiply_heads(
        args, layer.key_heads, num_heads, counters + 40, inputs, outputs, layer.latent_dim, storage
    )


@exact
def _place_latents(args: Any, layer: Any, queries: int, stride: int, team: Any, storage: Any) -> None:
    """Normalize latents, rotate keys and queries, and write the former unless blocks have 8 bits."""
    keep_apart()
    positions = carray(pointer(args.positions, np.int64), (args.num_tokens,))
    slots = carray(pointer(layer.slots, np.int64), (args.num_tokens,))
    dim, latent_dim, key_dim = args.head_dim, layer.latent_dim, layer.key_heads.in_features
    num_rotated, (first, end) = dim - latent_dim, share(args.num_tokens, team)
    rotated = np.empty(num_rotated, np.float32)
    rotated_at = np.int64(rotated.ctypes.data)
    for token in range(first, end):
        row_at, position = args.qkv + 4 * (token * args.qkv_stride + args.key_column), positions[token]
        key_at = row_at + 4 * latent_dim
        normalize_row(layer.key_norm, row_at, row_at, latent_dim, storage)
        rotate(args, layer, key_at, rotated_at, num_rotated, position, args.no_norm, storage)
        key = carray(pointer(key_at, np.float32), (num_rotated,))
        # Numba frees an array after the last use of its name.
        for d in range(num_rotated):
            key[d] = rotated[d]
        for head in range(args.num_heads):
            query_at = queries + 4 * (token * stride + head * (key_dim + num_rotated) + key_dim)
            output = args.queries + 4 * ((token * args.num_heads + head) * dim + latent_dim)
            rotate(args, layer, query_at, output, num_rotated, position, args.no_norm, storage)
        if args.kv_format != 0 or slots[token] < 0:
            continue
        block, offset = slots[token] // args.block_size, slots[token] % args.block_size
        stored_at = layer.kv + item_bytes(storage) * (block * args.block_stride + offset * dim)
        stored = carray(pointer(stored_at, storage), (dim,))
        row = carray(pointer(row_at, np.float32), (dim,))
        for d in range(dim):
            stored[d] = encode(row[d], storage)


@exact
def _multiply_heads(
    args: Any,
    linear: Any,
    num_heads: int,
    counter: int,
    inputs: Any,
    outputs: Any,
    size: int,
    storage: Any,
) -> None:
    """Multiply the inputs of each head by its own weight.

    Args:
        inputs, outputs: the address, and how many values lie between tokens, and between heads.
        size: the outputs of a head.
    """
    keep_apart()
    sums = np.empty((ROWS, UNIT), np.float32)
    sums_at, units_per_head = np.int64(sums.ctypes.data), linear.num_units // num_heads
    while True:
        program = np.int64(fetch_and_increment(counter))
        if program >= linear.num_units * -(-args.num_tokens // ROWS):
            break
        unit, first = place_of(program, args.num_tokens)
        head, column = unit // units_per_head, unit % units_per_head * UNIT
        count, stride = min(ROWS, args.num_tokens - first), 4 * inputs[1]
        inputs_at = inputs[0] + first * stride + 4 * head * inputs[2]
        compute_unit(linear, unit, (inputs_at, stride), (sums_at, UNIT), count, storage)
        for row in range(count):
            at = outputs[0] + 4 * ((first + row) * outputs[1] + head * outputs[2] + column)
            values = carray(pointer(at, np.float32), (UNIT,))
            for d in range(min(UNIT, size - column)):
                values[d] = sums[row, d]


@exact
def expand(args: Any, layer: Any, counters: int, team: Any, storage: Any) -> None:
    """Compute the results of heads from their sums of latents."""
    keep_apart()
    first, end = share(args.num_tokens, team)
    num_heads, value_dim = args.num_heads, layer.output.in_features // args.num_heads
    row_size = num_heads * layer.latent_dim
    if item_bytes(storage) < 4:
        narrow_rows(args.operands, row_size, first, end, storage)
        wait(args, team)
    inputs = (args.operands, row_size, layer.latent_dim)
    outputs, counter = (args.attended, num_heads * value_dim, value_dim), counters + 48
    _multiply_heads(args, layer.value_heads, num_heads, counter, inputs, outputs, value_dim, storage)
    wait(args, team)
    if layer.value.num_units == 0:
        return
    for token in range(first, end):
        gates_at = args.qkv + 4 * ((token + 1) * args.qkv_stride - layer.value.num_units * UNIT)
        activate(_SIGMOID, gates_at, num_heads, storage)
        gates = carray(pointer(gates_at, np.float32), (num_heads,))
        results_at = args.attended + 4 * token * num_heads * value_dim
        results = carray(pointer(results_at, np.float32), (num_heads, value_dim))
        for head in range(num_heads):
            for d in range(value_dim):
                results[head, d] = narrow(results[head, d] * gates[head], storage)
    wait(args, team)
