"""Sums over the rows of each token on the CPU, such as the results of its experts, times their factors.

The rows belong to segments. The rows of a segment are added in order, and the sums of segments in pairs, and
the results again in pairs, and so on, as for the segments of the inputs of a linear layer. A process with
some of the segments computes subtrees of these sums, so the bits do not depend on the number of processes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import exact, fetch_and_increment, keep_apart, pointer
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.unit_product import MOST_SEGMENTS
from quire.kernels.torch_functions import without_replacements

Int64s = np.ndarray[Any, np.dtype[np.int64]]

_MIN_THREADED_VALUES = 1 << 15
"""With fewer values than this, waking up threads costs more time than it saves."""
_FIELDS = (
    *("values", "factors", "segments", "places", "pieces", "output", "next_token"),
    *("num_rows", "row_stride", "width", "num_tokens", "num_places", "num_pieces"),
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])


@without_replacements
def weighted_sums(
    values: torch.Tensor, factors: torch.Tensor, segments: Int64s, places: Int64s, pieces: Int64s
) -> torch.Tensor:
    """Return the sums of each token's rows in each piece, float32 ``[num_pieces, num_tokens, width]``.

    Args:
        values: the rows, float32 ``[num_rows, width]``, whose last dimension is contiguous.
        factors: float32 ``[num_rows]``.
        segments: the segment of each row; at most ``MOST_SEGMENTS``.
        places: the rows of each token in ascending order, ``[num_tokens, num_places]``; numbers from
            ``num_rows`` stand for no row.
        pieces: the first segment of each piece, and the number of segments; a piece has a power of two of
            them.
    """
    (num_rows, width), (num_tokens, num_places) = values.shape, places.shape
    output = torch.empty((len(pieces) - 1, num_tokens, width))
    fields = (
        values.data_ptr(),
        factors.data_ptr(),
        segments.ctypes.data,
        places.ctypes.data,
        pieces.ctypes.data,
        output.data_ptr(),
        0,
        num_rows,
        values.stride(0),
        width,
        num_tokens,
        num_places,
        len(pieces) - 1,
    )
    num_threads = torch.get_num_threads() if values.numel() >= _MIN_THREADED_VALUES else 1
    threads.run_with_counter(_kernel().address, fields, _FIELDS.index("next_token"), num_threads)
    return output


@exact
def _sum_segments(args: Any, token: int, sums: Any) -> None:
    """Write the sum of a token's rows in each segment to ``sums``, float32 ``[MOST_SEGMENTS, width]``."""
    keep_apart()
    factors = carray(pointer(args.factors, np.float32), (args.num_rows,))
    segments = carray(pointer(args.segments, np.int64), (args.num_rows,))
    places = carray(pointer(args.places, np.int64), (args.num_tokens, args.num_places))
    for segment in range(MOST_SEGMENTS):
        for column in range(args.width):
            sums[segment, column] = 0.0
    for place in range(args.num_places):
        row = places[token, place]
        if row >= args.num_rows:
            break
        values = carray(pointer(args.values + 4 * row * args.row_stride, np.float32), (args.width,))
        factor, segment = factors[row], segments[row]
        for column in range(args.width):
            sums[segment, column] += values[column] * factor


@cache
def _kernel() -> Any:
    """Compile the function that each thread runs: it takes the next token until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        pieces = carray(pointer(args.pieces, np.int64), (args.num_pieces + 1,))
        output = carray(pointer(args.output, np.float32), (args.num_pieces, args.num_tokens, args.width))
        sums = np.empty((MOST_SEGMENTS, args.width), np.float32)
        while True:
            token = np.int64(fetch_and_increment(args.next_token))
            if token >= args.num_tokens:
                break
            _sum_segments(args, token, sums)
            for piece in range(args.num_pieces):
                first, end = pieces[piece], pieces[piece + 1]
                size = 1
                while size < end - first:
                    for segment in range(first, end, 2 * size):
                        for column in range(args.width):
                            sums[segment, column] += sums[segment + size, column]
                    size *= 2
                for column in range(args.width):
                    output[piece, token, column] = sums[first, column]

    return compile_kernel(_ARGUMENTS, kernel)
