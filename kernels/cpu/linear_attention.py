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
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
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
    sum_powers,
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
        num_heads, num_decays = self.step_bias.shape
        mixed = self._mixed(inputs, metadata, places)
        num_tokens, num_channels = mixed.shape
        steps, outputs = steps.contiguous(), torch.empty((num_tokens, self.num_outputs))
        factors = torch.empty((3, num_tokens, num_heads))
        decays = torch.empty((num_tokens, num_heads, num_decays))
        faded = torch.empty((num_tokens, num_heads, self.key_dim if num_decays > 1 else 0))
        num_sequences = metadata.block_tables.shape[1]
        rows = torch.empty((num_sequences, num_heads, 3, self.key_dim), dtype=torch.int64)
        width = _WIDTH if num_tokens > num_sequences else 0
        tiles = torch.empty((num_sequences, num_heads, self.key_dim, width))
        zeros = torch.zeros(self.row_size)
        tensors = (steps, mixed, outputs, factors, decays, faded, rows, tiles, zeros)
        weights = (self.rates, self.step_bias, self.skip)
        sizes = (num_tokens, num_channels, steps.shape[1], num_heads, self.num_key_heads, self.key_dim)
        numbers = (*sizes, num_decays, self.decay, self.most_replaced, 0)
        fields = (*(each.data_ptr() for each in (*tensors, *weights)), *numbers)
        values = (*fields, *place_values(metadata, places, self.row_size))
        run(_kernel(), _FIELDS, values)
        return outputs

    def _mixed(self, inputs: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces) -> torch.Tensor:
        """Return the queries, keys and values."""
        if self.taps is None or self.conv_bias is None:
            return inputs.contiguous()
        conv_places = places._replace(first_row=places.first_row + len(self.rates) * self.key_dim)
        return convolve(inputs, self.taps, self.conv_bias, metadata, conv_places, self.row_size)


_FIELDS = (
    *("steps", "mixed", "outputs", "factors", "decays", "faded", "rows", "tiles", "zeros"),
    *("rates", "step_bias", "skip"),
    *("num_tokens", "num_channels", "num_steps", "num_heads", "num_key_heads", "key_dim"),
    *("num_decays", "decay", "most_replaced", "next_task"),
    *PLACE_FIELDS,
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])


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
def _set_decays(args: Any, token: int, head: int) -> None:
    """Compute what the state of a head is multiplied by for a token."""
    keep_apart()
    num = args.num_decays
    decays = carray(pointer(args.decays + 4 * (token * args.num_heads + head) * num, np.float32), (num,))
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
def _set_factors(args: Any, token: int, head: int) -> None:
    """Compute the factors of ``advance`` for a token."""
    keep_apart()
    num_heads, key_dim, num_decays = args.num_heads, args.key_dim, args.num_decays
    one, epsilon = np.float32(1.0), np.float32(_EPSILON)
    factors = carray(pointer(args.factors, np.float32), (3, args.num_tokens, num_heads))
    steps = carray(pointer(args.steps, np.float32), (args.num_tokens, args.num_steps))
    _set_decays(args, token, head)
    if not args.most_replaced:
        bias = carray(pointer(args.step_bias, np.float32), (num_heads,))[head]
        factors[0, token, head] = np.float32(0.0)
        factors[1, token, head] = one if args.decay == _FIXED else softplus(steps[token, head] + bias)
        factors[2, token, head] = one
        return
    key_head = head // (num_heads // args.num_key_heads)
    query = args.mixed + 4 * (token * args.num_channels + key_head * key_dim)
    key = query + 4 * args.num_key_heads * key_dim
    query_square = sum_powers(np.int64(query), np.int64(key_dim), np.float32(0.0), 2)
    key_square = sum_powers(np.int64(key), np.int64(key_dim), np.float32(0.0), 2)
    key_factor = one / np.sqrt(key_square + epsilon)
    replaced = np.float32(args.most_replaced) * _sigmoid(steps[token, num_heads * num_decays + head])
    row = token * num_heads + head
    decays = args.decays + 4 * row * num_decays
    if num_decays > 1:
        _fade(args.faded + 4 * row * key_dim, key, decays, key_dim)
        factors[0, token, head] = key_factor
    else:
        factors[0, token, head] = carray(pointer(decays, np.float32), (1,))[0] * key_factor
    factors[1, token, head] = replaced * key_factor
    factors[2, token, head] = one / np.sqrt(np.float32(key_dim)) / np.sqrt(query_square + epsilon)


@exact
def _advance_head(args: Any, sequence: int, head: int) -> None:
    """Update the state of one head over the new tokens of a sequence, and write its outputs."""
    keep_apart()
    first, num_new, start = new_tokens(args, sequence)
    for token in range(first, first + num_new):
        _set_factors(args, token, head)
    shape = (args.num_sequences, args.num_heads, 3, args.key_dim)
    rows = carray(pointer(args.rows, np.int64), shape)[sequence, head]
    t = 0
    while t < num_new:
        position = start + t
        end = min(num_new, (position // args.block_size + 1) * args.block_size - start)
        for i in range(args.key_dim):
            row = head * args.key_dim + i
            rows[1, i] = row_at(args, sequence, position, row)
            rows[0, i] = rows[1, i]
            if position == 0:
                rows[0, i] = args.zeros
            elif position % args.block_size == 0:
                rows[0, i] = row_at(args, sequence, position - 1, row)
        for column in range(0, args.row_size, _WIDTH):
            _advance_columns(args, sequence, head, column, first + t, end - t)
        t = end


@exact
def _advance_columns(args: Any, sequence: int, head: int, column: int, token: int, num_new: int) -> None:
    """Update 16 or 32 columns over tokens of one block, the first of which is ``token``.

    Between the first token and the last one they lie in a tile. In a block, rows are a power of two apart for
    most models, so they would displace each other from the processor's cache.
    """
    keep_apart()
    factors = carray(pointer(args.factors, np.float32), (3, args.num_tokens, args.num_heads))
    skip = carray(pointer(args.skip, np.float32), (args.num_heads,))[head]
    num_keys, num_rows, num_decays = args.num_key_heads * args.key_dim, args.key_dim, args.num_decays
    key_head = head // (args.num_heads // args.num_key_heads)
    num_read = num_rows if args.most_replaced else 0
    state = sequence * args.num_heads + head
    sources = args.rows + 24 * state * num_rows
    targets, kept = sources + 8 * num_rows, sources + 16 * num_rows
    if num_new > 1:
        in_tile = carray(pointer(kept, np.int64), (num_rows,))
        for i in range(num_rows):
            in_tile[i] = args.tiles + 4 * ((state * num_rows + i) * _WIDTH - column)
    for at in range(token, token + num_new):
        row = at * args.num_heads + head
        query = args.mixed + 4 * (at * args.num_channels + key_head * num_rows)
        key = query + 4 * num_keys
        value = args.mixed + 4 * (at * args.num_channels + 2 * num_keys + head * args.row_size)
        reader = args.faded + 4 * row * num_rows if num_decays > 1 else key
        output, decays = args.outputs + 4 * row * args.row_size, args.decays + 4 * row * num_decays
        vectors = (query, reader, key, value, output, decays)
        of_token = (factors[0, at, head], factors[1, at, head], factors[2, at, head], skip)
        before = sources if at == token else kept
        after = targets if at == token + num_new - 1 else kept
        if args.row_size - column < _WIDTH:
            advance(before, after, column, vectors, of_token, num_rows, num_read, num_decays, 1)
        else:
            advance(before, after, column, vectors, of_token, num_rows, num_read, num_decays, 2)


@cache
def _kernel() -> Any:
    """Compile the function that each thread runs: it takes the next task until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        while True:
            task = np.int64(fetch_and_increment(args.next_task))
            if task >= args.num_sequences * args.num_heads:
                break
            _advance_head(args, task // args.num_heads, task % args.num_heads)

    signature = types.void(types.CPointer(from_dtype(_ARGUMENTS)))
    return compile_kernel(signature, kernel, error_model="numpy")
