"""The gated delta rule on the CPU, token by token, with states in KV blocks (Yang et al., arXiv 2412.06464).

::

    q, k, v = silu(convolution of the last inputs)         q, k are divided by their lengths, q also by √d
    S       = exp(-exp(A) * softplus(a + bias)) * S        b = sigmoid(beta), or twice that
    S       = S + k (b (v - k S))                          o = q S

Each token's state follows from the one before it in one order of operations, in float32. So the bits do not
depend on how a sequence was split into steps, nor on the number of threads.
"""

from __future__ import annotations

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

ROWS = 4
"""Rows of a head's state whose sums run apart; a head has a multiple of them."""
_EPSILON = 1e-6
"""What transformers adds to the squared length of a query or a key."""
_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)


class DeltaNet(NamedTuple):
    """The weights of a layer, all in float32.

    Attributes:
        taps: ``[num_taps, num_channels]``; the last one belongs to the token itself.
        conv_bias: ``[num_channels]``.
        decay: ``[num_heads]``, the negative ``exp(A)``.
        step_bias: ``[num_heads]``.
        num_key_heads: heads of queries and keys, each of which belongs to as many heads of values.
        key_dim: elements of a query and of a key.
        row_size: elements of a value, and thus of a row of the state.
        most_replaced: the largest part of the state that a token can replace: 1, or 2 to go beyond its value.
    """

    taps: torch.Tensor
    conv_bias: torch.Tensor
    decay: torch.Tensor
    step_bias: torch.Tensor
    num_key_heads: int
    key_dim: int
    row_size: int
    most_replaced: int

    @property
    def num_outputs(self) -> int:
        """Outputs for each token: one for each element of each value."""
        return len(self.decay) * self.row_size

    @property
    def num_rows(self) -> int:
        """Rows of a state: one for each element of each head's key, then the inputs of the convolution."""
        return len(self.decay) * self.key_dim + num_conv_rows(self.taps, self.row_size)

    def advance(
        self, inputs: torch.Tensor, steps: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces
    ) -> torch.Tensor:
        """Update the states of a step's sequences, and return the outputs of their new tokens.

        Args:
            inputs: float32 ``[num_tokens, num_channels]``: the queries, keys and values of all heads.
            steps: float32 ``[num_tokens, 2 * num_heads]``: ``a`` of each head, then ``beta``.
            metadata: the step's sequences, with ``block_tables`` for each frame.
            places: where the states lie.

        Returns:
            float32 ``[num_tokens, num_outputs]``.
        """
        num_heads, key_dim = len(self.decay), self.key_dim
        conv_places = places._replace(first_row=places.first_row + num_heads * key_dim)
        mixed = convolve(inputs, self.taps, self.conv_bias, metadata, conv_places, self.row_size)
        num_tokens, num_channels = mixed.shape
        steps, outputs = steps.contiguous(), torch.empty((num_tokens, self.num_outputs))
        factors = torch.empty((4, num_tokens, num_heads))
        num_sequences = metadata.block_tables.shape[1]
        rows = torch.empty((num_sequences, num_heads, 2, key_dim), dtype=torch.int64)
        zeros = torch.zeros(self.row_size)
        tensors = (steps, mixed, outputs, factors, rows, zeros, self.decay, self.step_bias)
        numbers = (num_tokens, num_channels, num_heads, self.num_key_heads, key_dim, self.most_replaced, 0)
        fields = (*(each.data_ptr() for each in tensors), *numbers)
        values = (*fields, *place_values(metadata, places, self.row_size))
        run(_kernel(), np.array([values], dtype=_ARGUMENTS))
        return outputs


_FIELDS = (
    *("steps", "mixed", "outputs", "factors", "rows", "zeros", "decay", "step_bias"),
    *("num_tokens", "num_channels", "num_heads", "num_key_heads", "key_dim", "most_replaced", "next_task"),
    *PLACE_FIELDS,
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])


@instruction
def advance(
    typingctx: Any,
    sources: Any,
    targets: Any,
    column: Any,
    vectors: Any,
    factors: Any,
    num_rows: Any,
    num: Any,
) -> Any:
    """Update some columns of a state by one token, and store their outputs.

    Each sum over the rows is divided into four, of every fourth row, which are then added in pairs.

    Args:
        sources, targets: addresses of int64 ``[num_rows]``, the addresses of rows before and after.
        column: the first column.
        vectors: addresses of the query and of the key, float32 ``[num_rows]``, and of the value and of the
            output, float32 ``[row_size]``.
        factors: float32: the decay of the state, the factors of the key where it reads and where it writes
            the state, and that of the query.
        num_rows: a multiple of 4.
        num: number of vectors of 16 columns, a literal.
    """
    if not isinstance(num, types.IntegerLiteral):
        return None
    count = num.literal_value
    vector = ir.VectorType(_FLOAT, LANES)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_at, target_at, first, vector_tuple, factor_tuple, rows = arguments[:6]
        query, key, value, output = (
            builder.inttoptr(each, _FLOAT.as_pointer())
            for each in cgutils.unpack_tuple(builder, vector_tuple)
        )
        decay, read, write, scale = (
            splat(builder, each, LANES) for each in cgutils.unpack_tuple(builder, factor_tuple)
        )
        sources_at, targets_at = (
            builder.inttoptr(each, _INT64.as_pointer()) for each in (source_at, target_at)
        )

        def columns(base: Any) -> list[Any]:
            start = builder.bitcast(builder.gep(base, [first]), vector.as_pointer())
            return [builder.gep(start, [ir.Constant(_INT64, number)]) for number in range(count)]

        def row_of(addresses: Any, index: Any) -> list[Any]:
            return columns(
                builder.inttoptr(builder.load(builder.gep(addresses, [index])), _FLOAT.as_pointer())
            )

        def element(base: Any, index: Any) -> Any:
            return splat(builder, builder.load(builder.gep(base, [index]), align=4), LANES)

        def summed(body: Any) -> list[Any]:
            """Sum what ``body`` adds for each row to the sums of its columns."""

            def rows_of_loop(index: Any, sums: Any) -> Any:
                results: dict[Any, Any] = {}
                for part in range(ROWS):
                    row = builder.add(
                        builder.mul(index, ir.Constant(_INT64, ROWS)), ir.Constant(_INT64, part)
                    )
                    parts = body(row, [sums[part, number] for number in range(count)])
                    results |= {(part, number): parts[number] for number in range(count)}
                return results

            zero = ir.Constant(vector, [0.0] * LANES)
            zeros = {(part, number): zero for part in range(ROWS) for number in range(count)}
            quarter = builder.udiv(rows, ir.Constant(_INT64, ROWS))
            sums = emit_loop(builder, quarter, zeros, rows_of_loop)
            return [
                builder.fadd(
                    builder.fadd(sums[0, number], sums[2, number]),
                    builder.fadd(sums[1, number], sums[3, number]),
                )
                for number in range(count)
            ]

        def read_row(row: Any, sums: list[Any]) -> list[Any]:
            factor = element(key, row)
            states = [builder.load(each, align=4) for each in row_of(sources_at, row)]
            return [fused(builder, factor, state, total) for state, total in zip(states, sums, strict=True)]

        found = summed(read_row)
        added = [
            builder.fmul(builder.fsub(builder.load(each, align=4), builder.fmul(total, read)), write)
            for each, total in zip(columns(value), found, strict=True)
        ]

        def write_row(row: Any, sums: list[Any]) -> list[Any]:
            factor, asked = element(key, row), element(query, row)
            results = []
            places = zip(row_of(sources_at, row), row_of(targets_at, row), added, sums, strict=True)
            for source, target, change, total in places:
                new = fused(builder, factor, change, builder.fmul(builder.load(source, align=4), decay))
                builder.store(new, target, align=4)
                results.append(fused(builder, asked, new, total))
            return results

        for each, total in zip(columns(output), summed(write_row), strict=True):
            builder.store(builder.fmul(total, scale), each, align=4)
        return context.get_dummy_value()

    signature = types.none(types.int64, types.int64, types.int64, vectors, factors, types.int64, num)
    return signature, codegen


@exact
def _set_factors(args: Any, first: int, num_new: int, head: int) -> None:
    """Compute the factors of ``advance`` for the new tokens of a sequence."""
    keep_apart()
    num_heads, key_dim = args.num_heads, args.key_dim
    one, epsilon = np.float32(1.0), np.float32(_EPSILON)
    factors = carray(pointer(args.factors, np.float32), (4, args.num_tokens, num_heads))
    steps = carray(pointer(args.steps, np.float32), (args.num_tokens, 2 * num_heads))
    bias = carray(pointer(args.step_bias, np.float32), (num_heads,))[head]
    rate = carray(pointer(args.decay, np.float32), (num_heads,))[head]
    scale = one / np.sqrt(np.float32(key_dim))
    key_head = head // (num_heads // args.num_key_heads)
    for token in range(first, first + num_new):
        query = args.mixed + 4 * (token * args.num_channels + key_head * key_dim)
        key = query + 4 * args.num_key_heads * key_dim
        query_square = sum_powers(np.int64(query), np.int64(key_dim), np.float32(0.0), 2)
        key_square = sum_powers(np.int64(key), np.int64(key_dim), np.float32(0.0), 2)
        key_factor = one / np.sqrt(key_square + epsilon)
        beta = steps[token, num_heads + head]
        small = exp(-abs(beta))
        replaced = (
            np.float32(args.most_replaced) * (one if beta >= np.float32(0.0) else small) / (one + small)
        )
        decay = exp(rate * softplus(steps[token, head] + bias))
        factors[0, token, head] = decay
        factors[1, token, head] = decay * key_factor
        factors[2, token, head] = replaced * key_factor
        factors[3, token, head] = scale / np.sqrt(query_square + epsilon)


@exact
def _advance_head(args: Any, sequence: int, head: int) -> None:
    """Update the state of one head over the new tokens of a sequence, and write its outputs."""
    keep_apart()
    first, num_new, start = new_tokens(args, sequence)
    _set_factors(args, first, num_new, head)
    shape = (args.num_sequences, args.num_heads, 2, args.key_dim)
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
        sources = args.rows + 16 * (sequence * args.num_heads + head) * args.key_dim
        column = 0
        while column < args.row_size:
            width = min(args.row_size - column, 2 * LANES)
            _advance_columns(args, head, column, width, first + t, end - t, sources)
            column += width
        t = end


@exact
def _advance_columns(
    args: Any, head: int, column: int, width: int, token: int, num_new: int, sources: int
) -> None:
    """Update 16 or 32 columns over tokens of one block, the first of which is ``token``."""
    keep_apart()
    factors = carray(pointer(args.factors, np.float32), (4, args.num_tokens, args.num_heads))
    num_keys, num_rows = args.num_key_heads * args.key_dim, args.key_dim
    key_head = head // (args.num_heads // args.num_key_heads)
    targets = sources + 8 * num_rows
    for at in range(token, token + num_new):
        query = args.mixed + 4 * (at * args.num_channels + key_head * num_rows)
        value = args.mixed + 4 * (at * args.num_channels + 2 * num_keys + head * args.row_size)
        output = args.outputs + 4 * (at * args.num_heads + head) * args.row_size
        vectors = (query, query + 4 * num_keys, value, output)
        of_token = (factors[0, at, head], factors[1, at, head], factors[2, at, head], factors[3, at, head])
        before = sources if at == token else targets
        if width == LANES:
            advance(before, targets, column, vectors, of_token, num_rows, 1)
        else:
            advance(before, targets, column, vectors, of_token, num_rows, 2)


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
