"""The recurrence of Mamba 2 on the CPU, token by token, with states in KV blocks.

::

    x, B, C = silu(convolution of the last inputs)         step = softplus(dt + bias)
    S       = exp(step * A) * S + (step * x) B             y    = S C + D x

Each token's state follows from the one before it in one order of operations, in float32. So the bits do not
depend on how a sequence was split into steps, nor on the number of threads. The state after a block's last
token stays in the block, and that of a sequence's last token lies in its last block.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils

from quire.kernels.cpu import threads
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
from quire.kernels.cpu.rows import Activation, activate
from quire.kernels.metadata import AttentionMetadata

Array = np.ndarray[Any, np.dtype[Any]]

LANES = 16
"""Values of a row that are updated together; a row has a multiple of them."""
ROWS = 4
"""Rows of a head's state that are updated together; a head has a multiple of them."""
_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_SILU = int(Activation.SILU)


class StatePlaces(NamedTuple):
    """Where the rows of a layer's states lie in blocks of several frames.

    Attributes:
        addresses: int64 ``[num_parts]``, the first address of each part of the memory of all states.
        frames: int64 ``[num_parts]``, for each part, its frame of a block.
        frame_bytes: distance of a part from the same part of the next frame.
        rows_per_part: rows in each part.
        block_size: tokens per block.
        first_row: the first of the layer's rows.
    """

    addresses: Array
    frames: Array
    frame_bytes: int
    rows_per_part: int
    block_size: int
    first_row: int


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
        size: elements of ``B`` and ``C``, and thus of a row of the state.
    """

    taps: torch.Tensor
    conv_bias: torch.Tensor
    decay: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    head_dim: int
    num_groups: int
    size: int

    @property
    def num_rows(self) -> int:
        """Rows of a state: one for each channel of each head, then the last inputs of the convolution."""
        num_taps, num_channels = self.taps.shape
        return len(self.decay) * self.head_dim + (num_taps - 1) * -(-num_channels // self.size)


def mamba(
    inputs: torch.Tensor, steps: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces, layer: Mamba
) -> torch.Tensor:
    """Update the states of a step's sequences, and return the outputs of their new tokens.

    Args:
        inputs: float32 ``[num_tokens, num_channels]``: each head's x, then B and C of each group.
        steps: float32 ``[num_tokens, num_heads]``.
        metadata: the step's sequences, with ``block_tables`` for each frame.
        places: where the states lie.
        layer: the weights.

    Returns:
        float32 ``[num_tokens, num_heads * head_dim]``.
    """
    num_tokens, num_channels = inputs.shape
    num_heads, num_taps = len(layer.decay), len(layer.taps)
    tables = metadata.block_tables
    num_sequences = tables.shape[1]
    inputs, steps = inputs.contiguous(), steps.contiguous()
    mixed = torch.empty((num_tokens, num_channels))
    outputs = torch.empty((num_tokens, num_heads * layer.head_dim))
    earlier = torch.empty((num_sequences, num_taps - 1, num_channels))
    factors = torch.empty((2, num_tokens, num_heads))
    tensors = (inputs, steps, mixed, outputs, earlier, factors, tables, metadata.query_starts)
    weights = (metadata.seq_lens, layer.taps, layer.conv_bias, layer.decay, layer.step_bias, layer.skip)
    counters = np.zeros(2, np.int64)
    numbers = (num_tokens, num_channels, num_sequences, tables.shape[2], num_heads, num_taps)
    shape = (layer.head_dim, layer.num_groups, layer.size)
    where = (places.addresses.ctypes.data, places.frames.ctypes.data, *places[2:])
    fields = (*(each.data_ptr() for each in (*tensors, *weights)), *numbers, *shape, *where)
    num_threads = torch.get_num_threads()
    for phase in range(2):
        counter = counters[phase : phase + 1].ctypes.data
        arguments = np.array([(*fields, phase, counter)], dtype=_ARGUMENTS)
        threads.run(_kernel().address, arguments.ctypes.data, num_threads)
    return outputs


_FIELDS = (
    *("inputs", "steps", "mixed", "outputs", "earlier", "factors", "tables", "query_starts", "seq_lens"),
    *("taps", "conv_bias", "decay", "step_bias", "skip"),
    *("num_tokens", "num_channels", "num_sequences", "table_width", "num_heads", "num_taps"),
    *("head_dim", "num_groups", "size"),
    *("addresses", "frames", "frame_bytes", "rows_per_part", "block_size", "first_row", "phase", "next_task"),
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
def _softplus(x: np.float32) -> np.float32:
    """Return ``log(1 + e**x)``; the series of the logarithm is exact to float32."""
    u = np.float64(exp(-abs(x)))
    s = u / (2.0 + u)
    square = s * s
    total = 0.0
    for k in range(10, -1, -1):
        total = total * square + 1.0 / (2 * k + 1)
    return np.float32(max(np.float64(x), 0.0) + 2.0 * s * total)


@exact
def _row_at(args: Any, sequence: int, position: int, row: int) -> int:
    """Return the address of a row of the state after the token at a position."""
    row += args.first_row
    part = row // args.rows_per_part
    frames = carray(pointer(args.frames, np.int64), (part + 1,))
    addresses = carray(pointer(args.addresses, np.int64), (part + 1,))
    index = (frames[part] * args.num_sequences + sequence) * args.table_width + position // args.block_size
    frame = np.int64(carray(pointer(args.tables, np.int32), (index + 1,))[index])
    offset = 4 * args.size * (row - part * args.rows_per_part)
    return int(addresses[part] + frame * args.frame_bytes + offset)


@exact
def _convolve(args: Any, sequence: int, segment: int) -> None:
    """Mix the inputs of the channels of one row's length, and keep the last ones in the state."""
    keep_apart()
    starts = carray(pointer(args.query_starts, np.int32), (sequence + 2,))
    first, num_new = np.int64(starts[sequence]), np.int64(starts[sequence + 1] - starts[sequence])
    start = np.int64(carray(pointer(args.seq_lens, np.int32), (sequence + 1,))[sequence]) - num_new
    low, num_taps = segment * args.size, args.num_taps
    num = min(args.size, args.num_channels - low)
    num_segments = (args.num_channels + args.size - 1) // args.size
    shape = (args.num_tokens, args.num_channels)
    inputs = carray(pointer(args.inputs, np.float32), shape)
    mixed = carray(pointer(args.mixed, np.float32), shape)
    taps = carray(pointer(args.taps, np.float32), (num_taps, args.num_channels))
    bias = carray(pointer(args.conv_bias, np.float32), (args.num_channels,))
    earlier_shape = (args.num_sequences, num_taps - 1, args.num_channels)
    earlier = carray(pointer(args.earlier, np.float32), earlier_shape)
    first_row = args.num_heads * args.head_dim + segment
    for j in range(num_taps - 1):
        if start == 0:
            earlier[sequence, j, low : low + num] = np.float32(0.0)
        else:
            row = _row_at(args, sequence, start - 1, first_row + j * num_segments)
            earlier[sequence, j, low : low + num] = carray(pointer(row, np.float32), (num,))
    for t in range(num_new):
        for c in range(low, low + num):
            mixed[first + t, c] = np.float32(0.0)
        for j in range(num_taps):
            at = t - (num_taps - 1) + j
            values = inputs[first + at] if at >= 0 else earlier[sequence, num_taps - 1 + at]
            for c in range(low, low + num):
                mixed[first + t, c] += taps[j, c] * values[c]
        for c in range(low, low + num):
            mixed[first + t, c] += bias[c]
        activate(_SILU, args.mixed + 4 * ((first + t) * args.num_channels + low), num, np.float32)
        if (start + t + 1) % args.block_size == 0 or t == num_new - 1:
            for j in range(num_taps - 1):
                at = t - (num_taps - 2) + j
                values = inputs[first + at] if at >= 0 else earlier[sequence, num_taps - 1 + at]
                row = _row_at(args, sequence, start + t, first_row + j * num_segments)
                carray(pointer(row, np.float32), (num,))[:] = values[low : low + num]


@exact
def _advance_head(args: Any, sequence: int, head: int) -> None:
    """Update the state of one head over the new tokens of a sequence, and write its outputs."""
    keep_apart()
    starts = carray(pointer(args.query_starts, np.int32), (sequence + 2,))
    first, num_new = np.int64(starts[sequence]), np.int64(starts[sequence + 1] - starts[sequence])
    start = np.int64(carray(pointer(args.seq_lens, np.int32), (sequence + 1,))[sequence]) - num_new
    factors = carray(pointer(args.factors, np.float32), (2, args.num_tokens, args.num_heads))
    steps = carray(pointer(args.steps, np.float32), (args.num_tokens, args.num_heads))
    bias = carray(pointer(args.step_bias, np.float32), (args.num_heads,))[head]
    decay = carray(pointer(args.decay, np.float32), (args.num_heads,))[head]
    for token in range(first, first + num_new):
        step = _softplus(steps[token, head] + bias)
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
        target = carray(pointer(_row_at(args, sequence, position, row + i), np.float32), (args.size,))
        if position == 0:
            target[:] = np.float32(0.0)
        elif position % args.block_size == 0:
            before = _row_at(args, sequence, position - 1, row + i)
            target[:] = carray(pointer(before, np.float32), (args.size,))
    rows = (
        _row_at(args, sequence, position, row),
        _row_at(args, sequence, position, row + 1),
        _row_at(args, sequence, position, row + 2),
        _row_at(args, sequence, position, row + 3),
    )
    group = head // (args.num_heads // args.num_groups)
    for at in range(token, token + num_new):
        step, decay = factors[0, at, head], factors[1, at, head]
        b = args.mixed + 4 * (at * args.num_channels + width + group * args.size)
        c = b + 4 * args.num_groups * args.size
        x = (mixed[at, row], mixed[at, row + 1], mixed[at, row + 2], mixed[at, row + 3])
        gains = (step * x[0], step * x[1], step * x[2], step * x[3])
        y = advance(rows, b, c, decay, gains, np.int64(args.size))
        for i in range(ROWS):
            outputs[at, row + i] = y[i] + skip * x[i]


@cache
def _kernel() -> Any:
    """Compile the function that each thread runs: it takes the next task until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        num_segments = (args.num_channels + args.size - 1) // args.size
        width = num_segments if args.phase == 0 else args.num_heads
        while True:
            task = np.int64(fetch_and_increment(args.next_task))
            if task >= args.num_sequences * width:
                break
            if args.phase == 0:
                _convolve(args, task // width, task % width)
            else:
                _advance_head(args, task // width, task % width)

    signature = types.void(types.CPointer(from_dtype(_ARGUMENTS)))
    return compile_kernel(signature, kernel, error_model="numpy")
