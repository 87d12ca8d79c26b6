"""What both kernels of attention read: their arguments, and which rows a tile of attention has."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import compiled, fetch_and_increment, pointer

Array = np.ndarray[Any, np.dtype[Any]]

LOWEST = np.float32(-1e30)
"""Used instead of minus infinity, since the difference of two infinities is NaN."""
_ADDRESSES = (
    *("query", "kv", "output", "block_tables", "query_starts", "seq_lens", "parts", "tiles"),
    *("sinks", "slopes", "kv_scales", "next_program"),
)
_INTEGERS = (
    *("num_programs", "num_kv_heads", "num_heads", "table_width", "block_stride", "value_offset"),
    *("head_stride", "scale_block_stride", "scale_value_offset", "window", "is_chunked"),
)
ARGUMENTS = np.dtype(
    [(name, np.int64) for name in _ADDRESSES + _INTEGERS] + [("scale", np.float32), ("softcap", np.float32)],
    align=True,
)
"""Arguments of a kernel; query and output are float32."""


@compiled
def next_program(args: Any) -> Any:
    """Take a program and return its number; it is negative if none is left.

    The last ones come first, since the last tokens of a prompt see the most keys.
    """
    return np.int64(args.num_programs) - 1 - np.int64(fetch_and_increment(args.next_program))


@compiled
def find_parts(args: Any, program: int) -> Any:
    """Return the parts ``[num_parts, 3]`` of a program's tile, and how many spans they share."""
    tile = carray(pointer(args.tiles + 24 * (program // args.num_kv_heads), np.int64), (3,))
    return carray(pointer(args.parts + 24 * tile[0], np.int64), (tile[1] - tile[0], 3)), tile[2]


@compiled
def place_rows(args: Any, parts: Array, positions: Array, group: int) -> Any:
    """Write the position of each row of a tile; return the number of rows."""
    num_rows = np.int64(0)
    for part in range(parts.shape[0]):
        first = _position(args, parts[part, 0], parts[part, 1])
        count = (parts[part, 2] - parts[part, 1]) * group
        for row in range(count):
            positions[num_rows + row] = first + row // group
        num_rows += count
    return num_rows


@compiled
def _position(args: Any, sequence: int, token: int) -> Any:
    """Return the position of a new token in its sequence, whose last token has position ``seq_len - 1``."""
    seq_len = carray(pointer(args.seq_lens + 4 * sequence, np.int32), (1,))[0]
    end = carray(pointer(args.query_starts + 4 * sequence, np.int32), (2,))[1]
    return np.int64(seq_len) - (np.int64(end) - token)


@compiled
def first_seen(args: Any, position: int) -> Any:
    """Return the first position that a token sees."""
    if args.window == 0:
        return 0
    if args.is_chunked:
        return position // args.window * args.window
    return max(0, position - args.window + 1)


@compiled
def find_stage(
    args: Any,
    parts: Array,
    num_shared: Any,
    positions: Array,
    end_row: int,
    stage: int,
    group: int,
    span: int,
) -> Any:
    """Return what a program computes in a stage.

    The spans that all parts share are first; then the other spans of each part follow, from the last part to
    the first. A part's products spill into the rows behind it, so the part that owns these rows must be
    finished before.

    Args:
        num_shared: spans that all parts share.
        end_row: row after the last one of the stage.

    Returns:
        The part, its first row, the spans as a first one and an end, the position of the first key that a row
        sees, and that after the last key.
    """
    own, first_row, first_span = np.int64(0), np.int64(0), np.int64(0)
    if stage == 0:
        # With a window, only the part with the lowest position surely has all blocks that the parts see.
        lowest, end_key, row = positions[0], num_shared * span, np.int64(0)
        for part in range(parts.shape[0]):
            if positions[row] < lowest:
                own, lowest = np.int64(part), positions[row]
            row += (parts[part, 2] - parts[part, 1]) * group
        end_span = num_shared
    else:
        own, first_span = np.int64(parts.shape[0] - stage), num_shared
        first_row = end_row - (parts[own, 2] - parts[own, 1]) * group
        lowest, end_key = positions[first_row], positions[end_row - 1] + 1
        end_span = positions[end_row - 1] // span + 1
    first_key = np.int64(first_seen(args, lowest))
    return own, first_row, max(first_span, first_key // span), end_span, first_key, end_key
