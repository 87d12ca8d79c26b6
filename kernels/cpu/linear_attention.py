"""Linear attention on the CPU, token by token, with states in KV blocks.

::

    q, k, v = silu(convolution of the last inputs)      d = exp(rate * softplus(step + bias))
    S       = d S + k u                                 o = q S + D v

A head's state S has a row for each element of a key. The kinds differ in what decays, and in what they add:

* gated delta nets (arXiv 2412.06464): d is a number, and u = b (v - k (d S)) with b = sigmoid(beta)
* Kimi delta attention (KDA, arXiv 2510.26692): the same, with a d for each row
* Mamba 2 (arXiv 2405.21060): d is a number, and u = softplus(step + bias) v
* lightning attention (arXiv 2401.04658): d is the same for all tokens, and u = v

Delta nets divide q and k by their lengths, and q also by √d. Each token's state follows from the one before
it in one order of operations, in float32. So the bits do not depend on how a sequence was split into steps,
nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import (
    emit_loop,
    exact,
    exp,
    fetch_and_increment,
    fused,
    instruction,
    keep_apart,
    pointer,
    splat,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.recurrence import (
    LANES,
    PLACE_FIELDS,
    StatePlaces,
    convolve,
    new_tokens,
    num_conv_rows,
    place_values,
    row_at,
    run,
    softplus,
)
from quire.kernels.cpu.vector_loops import sum_powers
from quire.kernels.metadata import AttentionMetadata


class Decay(IntEnum):
    """What a state is multiplied by for each token."""

    FIXED = 0
    """exp(rate)"""
    SOFTPLUS = 1
    """exp(rate * softplus(step + bias))"""
    SIGMOID = 2
    """exp(rate * sigmoid(step + bias))"""


ROWS = 4
"""Rows of a head's state whose sums run apart; a head has a multiple of them."""
_WIDTH = 2 * LANES
"""Columns of a state that are updated together."""
_EPSILON = 1e-6
"""What transformers adds to the squared length of a query or a key."""
_NUM_FACTORS = 3
"""The factors of a token that ``_set_factors`` computes; decays follow them."""
_MOST_TOKENS = 32
"""Tokens whose factors are computed together; with KDA those of a long prompt exceed the cache."""
_FIXED, _SOFTPLUS = int(Decay.FIXED), int(Decay.SOFTPLUS)
_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


class LinearAttention(NamedTuple):
    """The weights of a layer, all in float32.

    Attributes:
        taps: ``[num_taps, num_channels]``; the last one belongs to the token itself. None: the inputs are the
            queries, keys and values.
        conv_bias: ``[num_channels]``; None without taps.
        decay: how the state decays.
        rates: ``[num_heads]``, negative.
        step_bias: ``[num_heads, num_decays]``, one for each head, or one for each row of its state.
        skip: ``[num_heads]``, the factor ``D`` of a value in its output.
        num_key_heads: heads of queries and keys, each of which belongs to as many heads of values.
        key_dim: elements of a query and of a key.
        row_size: elements of a value, and thus of a row of the state.
        most_replaced: the largest part of the state that a token can replace: 1, or 2 to go beyond its value.
            With 0 it replaces nothing, and adds its value.
    """

    taps: torch.Tensor | None
    conv_bias: torch.Tensor | None
    decay: Decay
    rates: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    num_key_heads: int
    key_dim: int
    row_size: int
    most_replaced: int

    @property
    def num_outputs(self) -> int:
        """Outputs for each token: one for each element of each value."""
        return len(self.rates) * self.row_size

    @property
    def num_rows(self) -> int:
        """Rows of a state: one for each element of each head's key, then the inputs of the convolution."""
        num_conv = 0 if self.taps is None else num_conv_rows(self.taps, self.row_size)
        return len(self.rates) * self.key_dim + num_conv

    def advance(
        self, inputs: torch.Tensor, steps: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces
    ) -> torch.Tensor:
        """Update the states of a step's sequences, and return the outputs of their new tokens.

        Args:
            inputs: float32 ``[num_tokens, num_channels]``: the queries, keys and values of all heads.
            steps: float32 ``[num_tokens, num_steps]``: the ``num_decays`` steps of each head, unless the
                decay is fixed; then, if tokens replace parts of the state, ``beta`` of each head.
            metadata: the step's sequences, with ``block_tables`` for each frame.
            places: where the states lie.

        Returns:
            float32 ``[num_tokens, num_outputs]``.
        """
        mixed = self._mixed(inputs, metadata, places)
        steps, outputs = steps.contiguous(), torch.empty((len(mixed), self.num_outputs))
        tensors = (each.data_ptr() for each in (steps, mixed, outputs))
        numbers = (mixed.shape[1], steps.shape[1], 0)
        values = (*tensors, *numbers, *self.constants, *place_values(metadata, places, self.row_size))
        run(kernel(), FIELDS, values)
        return outputs

    @property
    def constants(self) -> tuple[int, ...]:
        """The values of ``CONSTANT_FIELDS``."""
        addresses = (each.data_ptr() for each in (self.rates, self.step_bias, self.skip))
        sizes = (*self.step_bias.shape, self.num_key_heads, self.key_dim)
        return (*addresses, *sizes, self.decay, self.most_replaced)

    def _mixed(self, inputs: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces) -> torch.Tensor:
        """Return the queries, keys and values."""
        if self.taps is None or self.conv_bias is None:
            return inputs.contiguous()
        return convolve(inputs, self.taps, self.conv_bias, metadata, self.conv_places(places), self.row_size)

    def conv_places(self, places: StatePlaces) -> StatePlaces:
        """Return where the inputs of the convolution lie."""
        return places._replace(first_row=places.first_row + len(self.rates) * self.key_dim)


CONSTANT_FIELDS = (
    *("rates", "step_bias", "skip"),
    *("num_heads", "num_decays", "num_key_heads", "key_dim", "decay", "most_replaced"),
)
"""The arguments of the kernel that depend on the layer alone."""
FIELDS = (
    *("steps", "mixed", "outputs", "num_channels", "num_steps", "next_task"),
    *CONSTANT_FIELDS,
    *PLACE_FIELDS,
)
ARGUMENTS = np.dtype([(name, np.int64) for name in FIELDS])


def _emit_sums(
    builder: Any, num_rows: Any, num_columns: int, add: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit the sums of what ``add`` adds for each row to the sums of vectors of columns.

    A sum is divided into four, of every fourth row, which are then added in pairs.
    """
    columns = range(num_columns)

    def add_rows(index: Any, sums: Any) -> Any:
        results: dict[Any, Any] = {}
        for part in range(ROWS):
            row = builder.add(builder.mul(index, ir.Constant(_INT64, ROWS)), ir.Constant(_INT64, part))
            parts = add(row, [sums[part, number] for number in columns])
            results |= {(part, number): parts[number] for number in columns}
        return results

    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    zeros = {(part, number): zero for part in range(ROWS) for number in columns}
    sums = emit_loop(builder, builder.udiv(num_rows, ir.Constant(_INT64, ROWS)), zeros, add_rows)
    return [
        builder.fadd(builder.fadd(sums[0, each], sums[2, each]), builder.fadd(sums[1, each], sums[3, each]))
        for each in columns
    ]


def _emit_advance(builder: Any, arguments: Any, count: int) -> None:
    """Emit the code of ``advance`` for a number of vectors of columns."""
    source_at, target_at, first, vector_tuple, factor_tuple, rows, rows_read, decay_count = arguments[:8]
    floats = _FLOAT.as_pointer()
    query, reader, key, value, output, decays = (
        builder.inttoptr(each, floats) for each in cgutils.unpack_tuple(builder, vector_tuple)
    )
    is_per_row = builder.icmp_signed(">", decay_count, ir.Constant(_INT64, 1))
    decay_step = builder.zext(is_per_row, _INT64)
    read, write, scale, skip = (
        splat(builder, each, LANES) for each in cgutils.unpack_tuple(builder, factor_tuple)
    )
    sources_at, targets_at = (builder.inttoptr(each, _INT64.as_pointer()) for each in (source_at, target_at))

    def columns(base: Any) -> list[Any]:
        start = builder.bitcast(builder.gep(base, [first]), _VECTOR.as_pointer())
        return [builder.gep(start, [ir.Constant(_INT64, number)]) for number in range(count)]

    def row_of(addresses: Any, index: Any) -> list[Any]:
        return columns(builder.inttoptr(builder.load(builder.gep(addresses, [index])), floats))

    def element(base: Any, index: Any) -> Any:
        return splat(builder, builder.load(builder.gep(base, [index]), align=4), LANES)

    def read_row(row: Any, sums: list[Any]) -> list[Any]:
        factor = element(reader, row)
        states = [builder.load(each, align=4) for each in row_of(sources_at, row)]
        return [fused(builder, factor, state, total) for state, total in zip(states, sums, strict=True)]

    values = [builder.load(each, align=4) for each in columns(value)]
    added = [
        builder.fmul(builder.fsub(each, builder.fmul(total, read)), write)
        for each, total in zip(values, _emit_sums(builder, rows_read, count, read_row), strict=True)
    ]

    def write_row(row: Any, sums: list[Any]) -> list[Any]:
        factor, asked = element(key, row), element(query, row)
        decay = element(decays, builder.mul(row, decay_step))
        results = []
        places = zip(row_of(sources_at, row), row_of(targets_at, row), added, sums, strict=True)
        for source, target, change, total in places:
            new = fused(builder, factor, change, builder.fmul(builder.load(source, align=4), decay))
            builder.store(new, target, align=4)
            results.append(fused(builder, asked, new, total))
        return results

    totals = _emit_sums(builder, rows, count, write_row)
    for each, total, own in zip(columns(output), totals, values, strict=True):
        builder.store(fused(builder, own, skip, builder.fmul(total, scale)), each, align=4)


@instruction
def advance(
    typingctx: Any,
    sources: Any,
    targets: Any,
    column: Any,
    vectors: Any,
    factors: Any,
    num_rows: Any,
    num_read: Any,
    num_decays: Any,
    num: Any,
) -> Any:
    """Update some columns of a state by one token, and store their outputs.

    Args:
        sources, targets: addresses of int64 ``[num_rows]``, the addresses of rows before and after.
        column: the first column.
        vectors: addresses of the query, of the key that reads the state and of the one that writes it,
            float32 ``[num_rows]``, of the value and of the output, float32 ``[row_size]``, and of the decays.
        factors: float32: those of the sum that is read, of what is written, of the query, and of the value in
            the output.
        num_rows: a multiple of 4.
        num_read: how many rows are read, to subtract the sum from the value: all or none.
        num_decays: 1, or ``num_rows``.
        num: number of vectors of 16 columns, a literal.
    """
    if not isinstance(num, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_advance(builder, arguments, num.literal_value)
        return context.get_dummy_value()

    numbers = (types.int64, types.int64, types.int64)
    return types.none(*numbers, vectors, factors, *numbers, num), codegen


@exact
def _sigmoid(x: np.float32) -> np.float32:
    small, one = exp(-abs(x)), np.float32(1.0)
    return np.float32((one if x >= np.float32(0.0) else small) / (one + small))


@exact
def _set_decays(args: Any, token: int, head: int, decays_at: int) -> None:
    """Compute what the state of a head is multiplied by for a token."""
    keep_apart()
    num = args.num_decays
    decays = carray(pointer(decays_at, np.float32), (num,))
    steps = carray(pointer(args.steps + 4 * (token * args.num_steps + head * num), np.float32), (num,))
    bias = carray(pointer(args.step_bias + 4 * head * num, np.float32), (num,))
    rate = carray(pointer(args.rates, np.float32), (args.num_heads,))[head]
    if args.decay == _FIXED:
        decays[:] = exp(rate)
    elif args.decay == _SOFTPLUS:
        for i in range(num):
            decays[i] = exp(rate * softplus(steps[i] + bias[i]))
    else:
        for i in range(num):
            decays[i] = exp(rate * _sigmoid(steps[i] + bias[i]))


@exact
def _fade(faded: int, key: int, decays: int, num: int) -> None:
    """Multiply each element of a key by the decay of its row."""
    keep_apart()
    products = carray(pointer(faded, np.float32), (num,))
    left, right = carray(pointer(key, np.float32), (num,)), carray(pointer(decays, np.float32), (num,))
    for i in range(num):
        products[i] = left[i] * right[i]


@exact
def _set_factors(args: Any, token: int, head: int, factors_at: int) -> None:
    """Compute the factors of ``advance`` for a token, then its decays and, if these differ, its faded key."""
    keep_apart()
    num_heads, key_dim, num_decays = args.num_heads, args.key_dim, args.num_decays
    one, epsilon = np.float32(1.0), np.float32(_EPSILON)
    factors = carray(pointer(factors_at, np.float32), (_NUM_FACTORS + 1,))
    steps = carray(pointer(args.steps + 4 * token * args.num_steps, np.float32), (args.num_steps,))
    decays = factors_at + 4 * _NUM_FACTORS
    _set_decays(args, token, head, decays)
    if not args.most_replaced:
        bias = carray(pointer(args.step_bias, np.float32), (num_heads,))[head]
        factors[0] = np.float32(0.0)
        factors[1] = one if args.decay == _FIXED else softplus(steps[head] + bias)
        factors[2] = one
        return
    key_head = head // (num_heads // args.num_key_heads)
    query = args.mixed + 4 * (token * args.num_channels + key_head * key_dim)
    key = query + 4 * args.num_key_heads * key_dim
    query_square = sum_powers(np.int64(query), np.int64(key_dim), np.float32(0.0), 2)
    key_square = sum_powers(np.int64(key), np.int64(key_dim), np.float32(0.0), 2)
    key_factor = one / np.sqrt(key_square + epsilon)
    replaced = np.float32(args.most_replaced) * _sigmoid(steps[num_heads * num_decays + head])
    if num_decays > 1:
        _fade(decays + 4 * num_decays, key, decays, key_dim)
        factors[0] = key_factor
    else:
        factors[0] = factors[_NUM_FACTORS] * key_factor
    factors[1] = replaced * key_factor
    factors[2] = one / np.sqrt(np.float32(key_dim)) / np.sqrt(query_square + epsilon)


@exact
def _advance_head(args: Any, sequence: int, head: int) -> None:
    """Update the state of one head over the new tokens of a sequence, and write its outputs."""
    keep_apart()
    first, num_new, start = new_tokens(args, sequence)
    key_dim, num_decays = args.key_dim, args.num_decays
    num_faded = key_dim if num_decays > 1 else 0
    factors = np.empty((_MOST_TOKENS, _NUM_FACTORS + num_decays + num_faded), np.float32)
    rows = np.empty((4, key_dim), np.int64)
    tile, zeros = np.empty((key_dim, _WIDTH), np.float32), np.zeros(args.row_size, np.float32)
    zeros_at = np.int64(zeros.ctypes.data)
    for i in range(key_dim):
        rows[3, i] = np.int64(tile[i].ctypes.data)
    t = 0
    while t < num_new:
        position = start + t
        end = min(num_new, (position // args.block_size + 1) * args.block_size - start, t + _MOST_TOKENS)
        for token in range(t, end):
            _set_factors(args, first + token, head, np.int64(factors[token - t].ctypes.data))
        for i in range(key_dim):
            row = head * key_dim + i
            rows[1, i] = row_at(args, sequence, position, row)
            rows[0, i] = rows[1, i]
            if position == 0:
                rows[0, i] = zeros_at
            elif position % args.block_size == 0:
                rows[0, i] = row_at(args, sequence, position - 1, row)
        for column in range(0, args.row_size, _WIDTH):
            _advance_columns(args, head, column, first + t, factors[: end - t], rows)
        t = end
    # Numba frees an array after the last use of its name.
    tile[0, 0] = zeros[0]


@exact
def _advance_columns(args: Any, head: int, column: int, token: int, factors: Any, rows: Any) -> None:
    """Update 16 or 32 columns over tokens of one block, the first of which is ``token``.

    Between the first token and the last one they lie in a tile. In a block, rows are a power of two apart for
    most models, so they would displace each other from the processor's cache.

    Args:
        factors: what ``_set_factors`` computed for each token.
        rows: int64 ``[4, num_rows]``, the addresses of rows before the tokens and after them, room for those
            of columns in the tile, and those of the tile's rows.
    """
    keep_apart()
    skip = carray(pointer(args.skip, np.float32), (args.num_heads,))[head]
    num_keys, num_rows, num_decays = args.num_key_heads * args.key_dim, args.key_dim, args.num_decays
    key_head = head // (args.num_heads // args.num_key_heads)
    num_read = num_rows if args.most_replaced else 0
    sources = np.int64(rows.ctypes.data)
    targets, kept = sources + 8 * num_rows, sources + 16 * num_rows
    num_new = len(factors)
    for i in range(num_rows):
        rows[2, i] = rows[3, i] - 4 * column
    for t in range(num_new):
        at = token + t
        query = args.mixed + 4 * (at * args.num_channels + key_head * num_rows)
        key = query + 4 * num_keys
        value = args.mixed + 4 * (at * args.num_channels + 2 * num_keys + head * args.row_size)
        decays = np.int64(factors[t].ctypes.data) + 4 * _NUM_FACTORS
        reader = decays + 4 * num_decays if num_decays > 1 else key
        output = args.outputs + 4 * (at * args.num_heads + head) * args.row_size
        vectors = (query, reader, key, value, output, decays)
        of_token = (factors[t, 0], factors[t, 1], factors[t, 2], skip)
        before = sources if t == 0 else kept
        after = targets if t == num_new - 1 else kept
        if args.row_size - column < _WIDTH:
            advance(before, after, column, vectors, of_token, num_rows, num_read, num_decays, 1)
        else:
            advance(before, after, column, vectors, of_token, num_rows, num_read, num_decays, 2)


@cache
def kernel() -> Any:
    """Compile the function that each thread runs: it takes the next task until none is left."""

    def advance_heads(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        while True:
            task = np.int64(fetch_and_increment(args.next_task))
            if task >= args.num_sequences * args.num_heads:
                break
            _advance_head(args, task // args.num_heads, task % args.num_heads)

    return compile_kernel(ARGUMENTS, advance_heads)
