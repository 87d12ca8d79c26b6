"""States in KV blocks, and the convolution of the inputs of layers with a state, on the CPU.

The state after a block's last token stays in the block, and that of a sequence's last token lies in its last
block. A state has rows of one length. Its last rows are the last inputs of the layer's convolution, which
like the recurrence itself runs token by token, in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import exact, exp, fetch_and_increment, keep_apart, pointer
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.rows import Activation, activate
from quire.kernels.metadata import AttentionMetadata

Array = np.ndarray[Any, np.dtype[Any]]

LANES = 16
"""Values of a row that are updated together; a row has a multiple of them."""
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


class Recurrence(Protocol):
    """The weights of a layer with a state, and how tokens change the state.

    Attributes:
        num_outputs: outputs for each token.
        num_rows, row_size: a state is ``num_rows`` rows of ``row_size`` float32 numbers.
        key_dim: rows of the state of a head.
        rates: how fast states decay.
    """

    @property
    def num_outputs(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def row_size(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def rates(self) -> torch.Tensor: ...

    def advance(
        self, inputs: torch.Tensor, steps: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces
    ) -> torch.Tensor:
        """Update the states of a step's sequences, and return the outputs of their new tokens.

        Args:
            inputs: float32 ``[num_tokens, num_channels]``.
            steps: float32 ``[num_tokens, num_steps]``, whose meaning depends on the kind of layer.
            metadata: the step's sequences, with ``block_tables`` for each frame.
            places: where the states lie.

        Returns:
            float32 ``[num_tokens, num_outputs]``.
        """


_LAYER_FIELDS = ("addresses", "frames", "frame_bytes", "rows_per_part", "block_size", "first_row", "row_size")
SEQUENCE_FIELDS = ("tables", "query_starts", "seq_lens", "num_sequences", "table_width")
"""The arguments of a kernel that describe a step's sequences."""
PLACE_FIELDS = (*SEQUENCE_FIELDS, *_LAYER_FIELDS)
"""The arguments of a kernel with which it finds states; see ``row_at``."""
FIELDS = (
    *("inputs", "mixed", "taps", "bias", "num_channels", "num_taps", "next_task"),
    *PLACE_FIELDS,
)
"""The arguments of the kernel of ``convolve``."""
ARGUMENTS = np.dtype([(name, np.int64) for name in FIELDS])


def place_values(metadata: AttentionMetadata, places: StatePlaces, row_size: int) -> tuple[int, ...]:
    """Return the values of ``PLACE_FIELDS``, which are valid while the arguments exist."""
    return (*sequence_values(metadata), *layer_values(places, row_size).values())


def sequence_values(metadata: AttentionMetadata) -> tuple[int, ...]:
    """Return the values of ``SEQUENCE_FIELDS``, which are valid while the argument exists."""
    tables = metadata.block_tables
    lengths = (metadata.query_starts.data_ptr(), metadata.seq_lens.data_ptr())
    return (tables.data_ptr(), *lengths, *tables.shape[1:])


def layer_values(places: StatePlaces, row_size: int) -> dict[str, int]:
    """Return the arguments that depend on the layer alone, which are valid while ``places`` exists."""
    where = (places.addresses.ctypes.data, places.frames.ctypes.data, *places[2:], row_size)
    return dict(zip(_LAYER_FIELDS, where, strict=True))


def run(kernel: Any, fields: tuple[str, ...], values: tuple[int, ...]) -> None:
    """Run a kernel on all threads; its argument ``next_task`` becomes the address of a count of its tasks."""
    threads.run_with_counter(kernel.address, values, fields.index("next_task"), torch.get_num_threads())


def num_conv_rows(taps: torch.Tensor, row_size: int) -> int:
    """Return how many rows of a state the last inputs of a convolution take."""
    num_taps, num_channels = taps.shape
    return (num_taps - 1) * -(-num_channels // row_size)


def convolve(
    inputs: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor,
    metadata: AttentionMetadata,
    places: StatePlaces,
    row_size: int,
) -> torch.Tensor:
    """Return ``silu(convolution + bias)`` of each channel's last inputs, and keep the inputs in the states.

    Args:
        inputs: float32 ``[num_tokens, num_channels]``.
        taps: float32 ``[num_taps, num_channels]``; the last one belongs to the token itself.
        bias: float32 ``[num_channels]``.
        metadata: the step's sequences, with ``block_tables`` for each frame.
        places: where the inputs lie.
        row_size: numbers in a row of a state.
    """
    inputs, mixed = inputs.contiguous(), torch.empty(inputs.shape)
    tensors = (inputs, mixed, taps, bias)
    numbers = (inputs.shape[1], len(taps), 0, *place_values(metadata, places, row_size))
    run(kernel(), FIELDS, (*(each.data_ptr() for each in tensors), *numbers))
    return mixed


@exact
def softplus(x: np.float32) -> np.float32:
    """Return ``log(1 + e**x)``; the series of the logarithm is exact to float32."""
    u = np.float64(exp(-abs(x)))
    s = u / (2.0 + u)
    square = s * s
    total = 0.0
    for k in range(10, -1, -1):
        total = total * square + 1.0 / (2 * k + 1)
    return np.float32(max(np.float64(x), 0.0) + 2.0 * s * total)


@exact
def new_tokens(args: Any, sequence: int) -> tuple[Any, Any, Any]:
    """Return the first new token of a sequence in the step, their number, and the first one's position."""
    starts = carray(pointer(args.query_starts, np.int32), (sequence + 2,))
    first, num_new = np.int64(starts[sequence]), np.int64(starts[sequence + 1] - starts[sequence])
    length = np.int64(carray(pointer(args.seq_lens, np.int32), (sequence + 1,))[sequence])
    return first, num_new, length - num_new


@exact
def row_at(args: Any, sequence: int, position: int, row: int) -> int:
    """Return the address of a row of the state after the token at a position."""
    row += args.first_row
    part = row // args.rows_per_part
    frames = carray(pointer(args.frames, np.int64), (part + 1,))
    addresses = carray(pointer(args.addresses, np.int64), (part + 1,))
    index = (frames[part] * args.num_sequences + sequence) * args.table_width + position // args.block_size
    frame = np.int64(carray(pointer(args.tables, np.int32), (index + 1,))[index])
    offset = 4 * args.row_size * (row - part * args.rows_per_part)
    return int(addresses[part] + frame * args.frame_bytes + offset)


@exact
def _copy(source: int, target: int, num: int) -> None:
    keep_apart()
    carray(pointer(target, np.float32), (num,))[:] = carray(pointer(source, np.float32), (num,))


@exact
def _add_product(target: int, left: int, right: int, num: int) -> None:
    keep_apart()
    sums = carray(pointer(target, np.float32), (num,))
    x, y = carray(pointer(left, np.float32), (num,)), carray(pointer(right, np.float32), (num,))
    for i in range(num):
        sums[i] += x[i] * y[i]


@exact
def _convolve(args: Any, sequence: int, segment: int) -> None:
    """Mix the inputs of the channels of one row's length, and keep the last ones in the state."""
    keep_apart()
    first, num_new, start = new_tokens(args, sequence)
    low, num_earlier = segment * args.row_size, args.num_taps - 1
    num = min(args.row_size, args.num_channels - low)
    num_segments = (args.num_channels + args.row_size - 1) // args.row_size
    earlier = np.zeros((num_earlier, num), np.float32)
    # The addresses of the inputs of the last tokens before the step, and of its tokens.
    inputs = np.empty(num_earlier + num_new, np.int64)
    for j in range(num_earlier):
        inputs[j] = np.int64(earlier[j].ctypes.data)
        if start > 0:
            _copy(row_at(args, sequence, start - 1, segment + j * num_segments), inputs[j], num)
    for t in range(num_new):
        inputs[num_earlier + t] = args.inputs + 4 * ((first + t) * args.num_channels + low)
    for t in range(num_new):
        mixed = args.mixed + 4 * ((first + t) * args.num_channels + low)
        _copy(args.bias + 4 * low, mixed, num)
        for j in range(args.num_taps):
            _add_product(mixed, args.taps + 4 * (j * args.num_channels + low), inputs[t + j], num)
        activate(_SILU, mixed, num, np.float32)
        if (start + t + 1) % args.block_size == 0 or t == num_new - 1:
            for j in range(num_earlier):
                target = row_at(args, sequence, start + t, segment + j * num_segments)
                _copy(inputs[t + 1 + j], target, num)
    # Numba frees an array after the last use of its name.
    earlier[:] = np.float32(0.0)


@cache
def kernel() -> Any:
    """Compile the function that each thread runs: it takes the next task until none is left."""

    def mix(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        num_segments = (args.num_channels + args.row_size - 1) // args.row_size
        while True:
            task = np.int64(fetch_and_increment(args.next_task))
            if task >= args.num_sequences * num_segments:
                break
            _convolve(args, task // num_segments, task % num_segments)

    return compile_kernel(ARGUMENTS, mix)
