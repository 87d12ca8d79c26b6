"""The recurrence of Mamba 2 on the CPU, token by token, with states in KV blocks.

::

    x, B, C = silu(convolution of the last inputs)         step = softplus(dt + bias)
    S       = exp(step * A) * S + (step * x) B             y    = S C + D x

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
    fold,
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
from quire.kernels.metadata import AttentionMetadata

ROWS = 4
"""Rows of a head's state that are updated together; a head has a multiple of them."""
_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)


class Mamba(NamedTuple):
    """The weights of a layer, all in float32.

    Attributes:
        taps: ``[num_taps, num_channels]``; the last one belongs to the token itself.
        conv_bias: ``[num_channels]``.
        decay: ``[num_heads]``, the negative ``A``.
        step_bias: ``[num_heads]``.
        skip: ``[num_heads]``, the factor ``D`` of a head's input in its output.
        head_dim: inputs of a head.
        num_groups: groups of heads, each with its own ``B`` and ``C``.
        row_size: elements of ``B`` and ``C``, and thus of a row of the state.
    """

    taps: torch.Tensor
    conv_bias: torch.Tensor
    decay: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    head_dim: int
    num_groups: int
    row_size: int

    @property
    def num_outputs(self) -> int:
        """Outputs for each token: one for each input of each head."""
        return len(self.decay) * self.head_dim

    @property
    def num_rows(self) -> int:
        """Rows of a state: one for each output, then the last inputs of the convolution."""
        return self.num_outputs + num_conv_rows(self.taps, self.row_size)

    def advance(
        self, inputs: torch.Tensor, steps: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces
    ) -> torch.Tensor:
        """Update the states of a step's sequences, and return the outputs of their new tokens.

        Args:
            inputs: float32 ``[num_tokens, num_channels]``: each head's x, then B and C of each group.
            steps: float32 ``[num_tokens, num_heads]``.
            metadata: the step's sequences, with ``block_tables`` for each frame.
            places: where the states lie.

        Returns:
            float32 ``[num_tokens, num_outputs]``.
        """
        conv_places = places._replace(first_row=places.first_row + self.num_outputs)
        mixed = convolve(inputs, self.taps, self.conv_bias, metadata, conv_places, self.row_size)
        (num_tokens, num_channels), num_heads = mixed.shape, len(self.decay)
        steps, outputs = steps.contiguous(), torch.empty((num_tokens, self.num_outputs))
        factors = torch.empty((2, num_tokens, num_heads))
        tensors = (steps, mixed, outputs, factors, self.decay, self.step_bias, self.skip)
        numbers = (num_tokens, num_channels, num_heads, self.head_dim, self.num_groups, 0)
        fields = (*(each.data_ptr() for each in tensors), *numbers)
        values = (*fields, *place_values(metadata, places, self.row_size))
        run(_kernel(), np.array([values], dtype=_ARGUMENTS))
        return outputs


_FIELDS = (
    *("steps", "mixed", "outputs", "factors", "decay", "step_bias", "skip"),
    *("num_tokens", "num_channels", "num_heads", "head_dim", "num_groups", "next_task"),
    *PLACE_FIELDS,
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])


@instruction
def advance(typingctx: Any, rows: Any, b: Any, c: Any, decay: Any, gains: Any, size: Any) -> Any:
    """Set each row to ``decay * row + gain * b``; return the products of the new rows and ``c``.

    Each of 16 lanes sums every 16th product, with fused multiplications. The lanes are then added in pairs.

    Args:
        rows: a tuple of the addresses of float32 ``[size]``.
        b, c: addresses of float32 ``[size]``.
        decay: float32.
        gains: a tuple of a float32 for each row.
        size: a multiple of 16.
    """
    vector = ir.VectorType(_FLOAT, LANES)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row_tuple, b_at, c_at, factor, gain_tuple, count = arguments
        num_rows = signature.args[0].count
        bases, b_base, c_base = (
            [builder.inttoptr(each, vector.as_pointer()) for each in addresses]
            if isinstance(addresses, list)
            else builder.inttoptr(addresses, vector.as_pointer())
            for addresses in (cgutils.unpack_tuple(builder, row_tuple, num_rows), b_at, c_at)
        )
        factors = splat(builder, factor, LANES)
        added = [splat(builder, each, LANES) for each in cgutils.unpack_tuple(builder, gain_tuple, num_rows)]

        def body(index: Any, sums: Any) -> Any:
            b_lanes = builder.load(builder.gep(b_base, [index]), align=4)
            c_lanes = builder.load(builder.gep(c_base, [index]), align=4)
            results = {}
            for number, base in enumerate(bases):
                place = builder.gep(base, [index])
                new = builder.fmul(added[number], b_lanes)
                new = fused(builder, builder.load(place, align=4), factors, new)
                builder.store(new, place, align=4)
                results[number] = fused(builder, new, c_lanes, sums[number])
            return results

        zeros = {number: ir.Constant(vector, [0.0] * LANES) for number in range(num_rows)}
        num_vectors = builder.udiv(count, ir.Constant(_INT64, LANES))
        sums = emit_loop(builder, num_vectors, zeros, body)
        totals = [fold(builder, sums[number], builder.fadd) for number in range(num_rows)]
        return context.make_tuple(builder, signature.return_type, totals)

    result = types.UniTuple(types.float32, rows.count)
    return result(rows, types.int64, types.int64, types.float32, gains, types.int64), codegen


@exact
def _advance_head(args: Any, sequence: int, head: int) -> None:
    """Update the state of one head over the new tokens of a sequence, and write its outputs."""
    keep_apart()
    first, num_new, start = new_tokens(args, sequence)
    factors = carray(pointer(args.factors, np.float32), (2, args.num_tokens, args.num_heads))
    steps = carray(pointer(args.steps, np.float32), (args.num_tokens, args.num_heads))
    bias = carray(pointer(args.step_bias, np.float32), (args.num_heads,))[head]
    decay = carray(pointer(args.decay, np.float32), (args.num_heads,))[head]
    for token in range(first, first + num_new):
        step = softplus(steps[token, head] + bias)
        factors[0, token, head] = step
        factors[1, token, head] = exp(step * decay)
    t = 0
    while t < num_new:
        end = min(num_new, ((start + t) // args.block_size + 1) * args.block_size - start)
        for channel in range(0, args.head_dim, ROWS):
            _advance_rows(args, sequence, head, channel, first + t, end - t, start + t)
        t = end


@exact
def _advance_rows(
    args: Any, sequence: int, head: int, channel: int, token: int, num_new: int, position: int
) -> None:
    """Update four rows over tokens of one block, the first of which is ``token`` at ``position``."""
    keep_apart()
    width = args.num_heads * args.head_dim
    factors = carray(pointer(args.factors, np.float32), (2, args.num_tokens, args.num_heads))
    mixed = carray(pointer(args.mixed, np.float32), (args.num_tokens, args.num_channels))
    outputs = carray(pointer(args.outputs, np.float32), (args.num_tokens, width))
    skip = carray(pointer(args.skip, np.float32), (args.num_heads,))[head]
    row = head * args.head_dim + channel
    for i in range(ROWS):
        target = carray(pointer(row_at(args, sequence, position, row + i), np.float32), (args.row_size,))
        if position == 0:
            target[:] = np.float32(0.0)
        elif position % args.block_size == 0:
            before = row_at(args, sequence, position - 1, row + i)
            target[:] = carray(pointer(before, np.float32), (args.row_size,))
    rows = (
        row_at(args, sequence, position, row),
        row_at(args, sequence, position, row + 1),
        row_at(args, sequence, position, row + 2),
        row_at(args, sequence, position, row + 3),
    )
    group = head // (args.num_heads // args.num_groups)
    for at in range(token, token + num_new):
        step, decay = factors[0, at, head], factors[1, at, head]
        b = args.mixed + 4 * (at * args.num_channels + width + group * args.row_size)
        c = b + 4 * args.num_groups * args.row_size
        x = (mixed[at, row], mixed[at, row + 1], mixed[at, row + 2], mixed[at, row + 3])
        gains = (step * x[0], step * x[1], step * x[2], step * x[3])
        y = advance(rows, b, c, decay, gains, np.int64(args.row_size))
        for i in range(ROWS):
            outputs[at, row + i] = y[i] + skip * x[i]


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
