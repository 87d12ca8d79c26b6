"""Tiles of attention: sequences that begin with the same blocks share one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.cpu.attention_tiles import AttentionShape, DecodeTiles, make_parts, make_tiles, part_tokens

BLOCK_SIZE = 16
SPAN_BLOCKS = 4

Array = np.ndarray[Any, np.dtype[Any]]


def tiles_of(
    tables: list[list[int]], new_tokens: list[int], seq_lens: list[int], group: int = 2, num_threads: int = 1
) -> tuple[Array, Array]:
    """Return the parts and tiles of sequences whose tables may differ in length."""
    width = max(map(len, tables))
    padded = np.array([table + [2**30] * (width - len(table)) for table in tables], np.int32)
    starts = np.array([0, *np.cumsum(new_tokens)], np.int32)
    parts = make_parts(starts, np.array(new_tokens), part_tokens(group, 128))
    shape = AttentionShape(BLOCK_SIZE, 4 * group, 4)
    return make_tiles(parts, padded, starts, np.array(seq_lens, np.int32), shape, num_threads)


def decode(tables: list[list[int]], **options: int) -> list[tuple[set[int], int]]:
    """Return the sequences and the shared spans of each tile of a step that decodes."""
    seq_lens = [BLOCK_SIZE * len(table) for table in tables]
    parts, tiles = tiles_of(tables, [1] * len(tables), seq_lens, **options)
    return [(set(parts[first:end, 0].tolist()), shared) for first, end, shared in tiles.tolist()]


def test_different_prefixes_get_different_tiles_in_any_order_of_sequences() -> None:
    one, two = list(range(100, 108)), list(range(200, 204))
    tables = [[*one, 1], [*two, 2], [*one, 3], [*two, 4], [5, 6, 7, 8, 9]]
    assert sorted(decode(tables), key=lambda tile: min(tile[0])) == [({0, 2}, 2), ({1, 3}, 1), ({4}, 0)]


def test_a_long_prefix_is_not_cut_because_others_share_a_short_one() -> None:
    first, rest = list(range(100, 104)), list(range(200, 236))
    tables = [[*first, 1, 2, 3, 4, 5], [*first, *rest, 6], [*first, 7, 8, 9, 10, 11], [*first, *rest, 12]]
    assert ({1, 3}, 10) in decode(tables)


def test_a_span_that_a_token_lies_in_is_not_shared() -> None:
    table = list(range(4))
    for seq_len, shared in ((64, 1), (63, 0)):
        _, tiles = tiles_of([table, table], [1, 1], [64, seq_len])
        assert tiles[:, 2].max() == shared


def test_unused_entries_of_tables_are_no_shared_blocks() -> None:
    _, tiles = tiles_of([[0], [1], list(range(2, 7))], [1, 1, 1], [9, 9, 70])
    assert tiles[:, 2].tolist() == [0, 0, 0]
    _, tiles = tiles_of([[0], [1], [2] * 5], [1, 1, 1], [9, 9, 9])
    assert tiles[:, 2].tolist() == [0, 0, 0]


def test_threads_get_enough_tiles() -> None:
    tables = [[0, 1, 2, 3, 10 + row] for row in range(16)]
    assert len(decode(tables, num_threads=1)) == 1
    assert len(decode(tables, num_threads=4)) == 4
    assert len(decode(tables, num_threads=64)) == 16


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 4),
)
def test_tiles_hold_each_token_once_and_share_only_blocks_that_are_equal_and_full(
    sequences: list[tuple[int, int, int]], group: int, num_threads: int
) -> None:
    tables, seq_lens = [], []
    for row, (prefix, num_prefix_blocks, num_own_blocks) in enumerate(sequences):
        own = range(10_000 + 100 * row, 10_000 + 100 * row + num_own_blocks)
        tables.append([*range(1000 * prefix, 1000 * prefix + num_prefix_blocks), *own])
        seq_lens.append(BLOCK_SIZE * len(tables[-1]) - row % BLOCK_SIZE)
    new_tokens = [min(own, seq_len) for (_, _, own), seq_len in zip(sequences, seq_lens, strict=True)]
    parts, tiles = tiles_of(tables, new_tokens, seq_lens, group, num_threads)

    tokens = sorted(token for _, first, end in parts.tolist() for token in range(first, end))
    assert tokens == list(range(sum(new_tokens)))
    assert np.concatenate([np.arange(first, end) for first, end, _ in tiles]).tolist() == list(
        range(len(parts))
    )
    for first, end, shared in tiles.tolist():
        members = parts[first:end, 0].tolist()
        assert end - first > 1 or shared == 0
        assert len({tuple(tables[each][: shared * SPAN_BLOCKS]) for each in members}) == 1
        for each in members if shared else []:
            assert shared * SPAN_BLOCKS * BLOCK_SIZE <= seq_lens[each] - new_tokens[each] + 1


def test_tiles_of_decode_steps_are_kept_while_their_sequences_stay() -> None:
    tiles_of_steps = DecodeTiles(AttentionShape(BLOCK_SIZE, 8, 4))
    tables = np.array([[0, 1, 2, 3, 10 + row, 0] for row in range(8)], np.int32)
    starts, seq_lens = np.arange(9, dtype=np.int32), np.full(8, 70, np.int32)

    def step() -> list[tuple[set[int], int]]:
        parts, tiles = tiles_of_steps.of(tables, starts, seq_lens, 1)
        return [(set(parts[first:end, 0].tolist()), shared) for first, end, shared in tiles.tolist()]

    before = tiles_of_steps.of(tables, starts, seq_lens, 1)
    tables[3, 5], seq_lens[3] = 77, 81
    assert tiles_of_steps.of(tables, starts, seq_lens, 1) is before
    tables[3, 3] = 99
    assert step() == [({0, 1, 2, 4, 5, 6, 7}, 1), ({3}, 0)]
    tables[3, 3], seq_lens[5] = 3, 63
    assert ({5}, 0) in step()
    assert len(tiles_of_steps.of(tables[:4], starts[:5], seq_lens[:4], 1)[0]) == 4
    assert len(tiles_of_steps.of(tables, starts, seq_lens, 4)[1]) == 5
