"""Linear layers on the CPU: threads divide the units of a packed weight's columns."""

from __future__ import annotations

from array import array
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import call, fetch_and_increment, pointer
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.packed_weight import UNIT, PackedWeight
from quire.kernels.cpu.products.unit_product import ROWS, UnitCall, unit_kernel
from quire.kernels.torch_functions import without_replacements

_MIN_THREADED_WORK = 1 << 19
"""With fewer multiplications than this, waking up threads costs more time than it saves."""
_CHUNK_BYTES = 4 * 8
"""Bytes of a chunk of ``multiply_chunks``."""
_FIELDS = (
    "inputs",
    "chunks",
    "output",
    "next_unit",
    "num_chunks",
    "in_features",
    "first_input",
    "num_inputs",
    "num_segments",
    "input_stride",
    "output_stride",
    "num_units",
    "head_stride",
    "units_per_head",
    "multiply",
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])
_PACKED = Struct(f"{len(_FIELDS)}q")
"""Packs the arguments, in a quarter of the time of an array of NumPy."""


@without_replacements
def linear(
    inputs: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, num_segments: int = 1
) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias``.

    Args:
        inputs: ``[..., in_features]``, in the dtype of the weight.
        weight: the packed weight.
        bias: float32 ``[num_units * UNIT]``.
        num_segments: equal segments of inputs that are summed separately, see ``num_segments_of``.
    """
    result = sums(inputs, weight, bias, num_segments)
    if result.shape[1] != weight.out_features:
        result = result[:, : weight.out_features]
    return result.to(inputs.dtype).view(*inputs.shape[:-1], weight.out_features)


def sums(
    inputs: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    num_segments: int = 1,
    own_inputs: range | None = None,
    num_heads: int = 1,
) -> torch.Tensor:
    """Return the result of ``linear`` before it is rounded: float32 ``[num_rows, num_units * UNIT]``.

    Args:
        own_inputs: the inputs to sum, which have ``num_segments`` segments; None means all inputs.
        num_heads: number of equal parts of the units; each multiplies inputs of its own, so the inputs are
            ``[num_rows, num_heads, in_features]``.
    """
    rows = weight.operands(inputs.reshape(-1, weight.in_features))
    weight_at, bias_at = weight.panels.data_ptr(), 0 if bias is None else bias.data_ptr()
    num_rows = rows.shape[0] // num_heads
    chunks = array("q")
    for first in range(0, num_rows, ROWS):
        chunks.extend((first, min(ROWS, num_rows - first), weight_at, bias_at))
    num_chunks = len(chunks) // 4
    chunks.append(0)
    address = chunks.buffer_info()[0]
    return multiply_chunks(rows, address, num_chunks, weight, num_segments, own_inputs, num_heads)


def multiply_chunks(
    rows: torch.Tensor,
    chunks_at: int,
    num_chunks: int,
    weight: PackedWeight,
    num_segments: int = 1,
    own_inputs: range | None = None,
    num_heads: int = 1,
) -> torch.Tensor:
    """Multiply chunks of rows by packed weights of one shape and type, see ``sums``.

    Args:
        rows: what ``weight.operands`` returned.
        chunks_at: address of int64 ``[num_chunks, 4]``: for each chunk its first row, the number of its rows,
            which is at most ``ROWS``, and the addresses of its weight and its bias, or 0. A zero follows,
            with which threads count the units that they take.
        weight: one of the weights.
        num_segments, own_inputs, num_heads: as for ``sums``.
    """
    own, num_units = own_inputs or range(weight.in_features), weight.num_units
    (num_operands, row_size), width = rows.shape, num_units * UNIT
    row_bytes = rows.itemsize * row_size
    output = torch.empty((num_operands // num_heads, width))
    arguments = (
        rows.data_ptr(),
        chunks_at,
        output.data_ptr(),
        chunks_at + _CHUNK_BYTES * num_chunks,
        num_chunks,
        weight.in_features,
        own.start,
        len(own),
        num_segments,
        num_heads * row_bytes,
        width,
        num_units,
        row_bytes,
        num_units // num_heads,
        unit_kernel(weight.stored).address,
    )
    is_threaded = num_operands // num_heads * width * len(own) >= _MIN_THREADED_WORK
    num_threads = torch.get_num_threads() if is_threaded else 1
    threads.run(_kernel().address, _PACKED.pack(*arguments), num_threads)
    return output


@cache
def _kernel() -> Any:
    """Compile the function that each thread runs: it takes the next unit until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        chunks = carray(pointer(args.chunks, np.int64), (args.num_chunks, 4))
        while True:
            program = np.int64(fetch_and_increment(args.next_unit))
            if program >= args.num_units * args.num_chunks:
                break
            unit, chunk = program // args.num_chunks, program % args.num_chunks
            first = chunks[chunk, 0]
            unit_call = UnitCall(
                args.inputs + first * args.input_stride + unit // args.units_per_head * args.head_stride,
                args.input_stride,
                chunks[chunk, 2],
                args.in_features,
                unit,
                args.first_input,
                args.num_inputs,
                args.output + 4 * (first * args.output_stride + unit * UNIT),
                args.output_stride,
                chunks[chunk, 1],
                args.num_segments,
                chunks[chunk, 3],
            )
            call(args.multiply, unit_call)

    return compile_kernel(_ARGUMENTS, kernel)
