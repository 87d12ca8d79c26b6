"""Divides the new tokens of a step into tiles of attention.

A part has consecutive new tokens of one sequence. A tile is a run of parts whose sequences begin with the
same blocks; most tiles have one part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_SPAN = 64
"""Keys per span, or one block if that is more; the running softmax is updated once per span."""
_MAX_ROWS = 256
"""Most rows of a part; a row is a token for one query head."""
_MAX_ELEMENTS = 1 << 17
"""Most elements of a part's queries and outputs, so that they fit into a core's cache."""
_MAX_SHARED_ROWS = 64
"""Most rows of a tile with several parts. With more rows, the cost of a key per row hardly falls."""
_TILES_PER_THREAD = 4
"""Number of programs per thread, so that all threads end at about the same time."""


@dataclass(frozen=True)
class AttentionShape:
    """The properties of a model on which the tiles depend, in addition to the sequences."""

    block_size: int
    num_heads: int
    num_kv_heads: int

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


def span_blocks(block_size: int) -> int:
    """Return how many blocks a span has; spans are counted from a table's first block."""
    return max(1, _SPAN // block_size)


def part_tokens(group: int, row_elements: int) -> int:
    """Return the most tokens of a part.

    Args:
        group: query heads of each KV head.
        row_elements: elements of the query and of the output of a row.
    """
    num_rows = max(_MAX_SHARED_ROWS, min(_MAX_ROWS, _MAX_ELEMENTS // row_elements))
    return max(1, num_rows // group)


def make_parts(query_starts: Array, num_new: Array, max_tokens: int) -> Array:
    """Divide the new tokens of each sequence into equal parts.

    Returns:
        int64 ``[num_parts, 3]``: rows of (sequence, first token, last token + 1).
    """
    if (num_new == 1).all():
        one_each: Array = np.arange(len(num_new))[:, None] + np.array([0, 0, 1])
        return one_each
    num_parts = -(-num_new // max_tokens)
    sequence = np.repeat(np.arange(len(num_parts)), num_parts)
    part_index = np.arange(len(sequence)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    parts = np.empty((len(sequence), 3), np.int64)
    parts[:, 0] = sequence
    for column, index in ((1, part_index), (2, part_index + 1)):
        parts[:, column] = query_starts[sequence] + index * num_new[sequence] // num_parts[sequence]
    return parts


def one_part_each(num_parts: int) -> Array:
    """Return tiles of one part each, as ``make_tiles`` does."""
    tiles = np.zeros((num_parts, 3), np.int64)
    tiles[:, 0] = np.arange(num_parts)
    tiles[:, 1] = tiles[:, 0] + 1
    return tiles


def make_tiles(
    parts: Array,
    block_tables: Array,
    query_starts: Array,
    seq_lens: Array,
    shape: AttentionShape,
    num_threads: int,
) -> tuple[Array, Array]:
    """Join parts whose sequences begin with the same blocks to tiles.

    Args:
        parts: int64 ``[num_parts, 3]``, see ``make_parts``.
        block_tables: int32 ``[num_sequences, width]``.
        query_starts: ``[num_sequences + 1]``, the first new token of each sequence.
        seq_lens: ``[num_sequences]``, tokens of each sequence, including the new ones.

    Returns:
        The parts in the order of the tiles, and the tiles as int64 ``[num_tiles, 3]``: rows of (first part,
        last part + 1, spans of blocks that all its parts share).
    """
    span = span_blocks(shape.block_size)
    num_spans = block_tables.shape[1] // span
    most_parts = len(parts) * shape.num_kv_heads // (_TILES_PER_THREAD * num_threads)
    most_tokens = _MAX_SHARED_ROWS // shape.group
    if most_parts < 2 or most_tokens < 2 or num_spans < 1:
        return parts, one_part_each(len(parts))
    sequences = parts[:, 0]
    first_ends = np.sort(block_tables[sequences, span - 1])
    if not (first_ends[1:] == first_ends[:-1]).any():
        return parts, one_part_each(len(parts))
    # Sorting by the blocks at the ends of 1, 2, 4, 8 and more spans is enough to make long common prefixes
    # adjacent.
    ends = [block_tables[sequences, span * 2**level - 1] for level in range(num_spans.bit_length())]
    parts = parts[np.lexsort(ends[::-1])]
    sequences = parts[:, 0]
    # A part whose first token has position p sees all of the first p + 1 keys.
    num_visible = parts[:, 1] - query_starts[sequences + 1] + seq_lens[sequences] + 1
    visible = np.minimum(num_visible // (span * shape.block_size), num_spans)
    if not visible.any():
        return parts, one_part_each(len(parts))
    tables = block_tables[sequences, : int(visible.max()) * span]
    differs = tables[1:] != tables[:-1]
    num_equal = np.where(differs.any(axis=1), differs.argmax(axis=1), tables.shape[1]) // span
    num_shared = np.minimum(num_equal, np.minimum(visible[1:], visible[:-1]))
    return parts, _join(parts[:, 2] - parts[:, 1], num_shared, most_parts, most_tokens)


class DecodeTiles:
    """Caches the tiles of steps that compute one token of each sequence.

    They are valid while the batch's tables begin with the same blocks.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._num_threads = 0
        self._tables = np.empty((0, 0), np.int32)
        self._least_lens = np.empty(0, np.int64)
        self._tiles = (np.empty((0, 3), np.int64), np.empty((0, 3), np.int64))

    def of(
        self, block_tables: Array, query_starts: Array, seq_lens: Array, num_threads: int
    ) -> tuple[Array, Array]:
        """Return the parts and tiles of a step, see ``make_tiles``."""
        is_kept = (
            num_threads == self._num_threads
            and np.array_equal(block_tables[:, : self._tables.shape[1]], self._tables)
            and (seq_lens >= self._least_lens).all()
        )
        if not is_kept:
            parts = np.arange(len(seq_lens))[:, None] + np.array([0, 0, 1])
            self._num_threads = num_threads
            self._tiles = make_tiles(parts, block_tables, query_starts, seq_lens, self._shape, num_threads)
            self._keep(block_tables)
        return self._tiles

    def _keep(self, block_tables: Array) -> None:
        """Record the leading blocks on which the tiles depend, at least those of the first span."""
        parts, tiles = self._tiles
        span = span_blocks(self._shape.block_size)
        num_shared = np.repeat(tiles[:, 2], tiles[:, 1] - tiles[:, 0])
        self._tables = block_tables[:, : span * max(1, int(num_shared.max()))].copy()
        self._least_lens = np.zeros(len(parts), np.int64)
        self._least_lens[parts[:, 0]] = num_shared * span * self._shape.block_size


def _join(num_tokens: Array, num_shared: Array, most_parts: int, most_tokens: int) -> Array:
    """Return tiles of neighbouring parts, see ``make_tiles``.

    Parts are not joined if one of them shares more than twice as many spans with its other neighbour.

    Args:
        num_tokens: new tokens of each part.
        num_shared: spans that each part shares with the next one.
    """
    stronger = np.zeros_like(num_shared)
    stronger[1:] = num_shared[:-1]
    stronger[:-1] = np.maximum(stronger[:-1], num_shared[1:])
    joins = (num_shared > 0) & (stronger <= 2 * num_shared)
    tokens, tiles = num_tokens.tolist(), [[0, 1, 0]]
    tile_tokens = tokens[0]
    links = zip(joins.tolist(), num_shared.tolist(), strict=True)
    for part, (is_joined, shared) in enumerate(links, start=1):
        first, end, least = tiles[-1]
        if is_joined and end - first < most_parts and tile_tokens + tokens[part] <= most_tokens:
            tiles[-1] = [first, part + 1, min(shared, least or shared)]
            tile_tokens += tokens[part]
        else:
            tiles.append([part, part + 1, 0])
            tile_tokens = tokens[part]
    return np.array(tiles, np.int64)
