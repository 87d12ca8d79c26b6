"""Block tables apart from the engine: the cached prefix, shared blocks, and what is freed when."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import NO_BLOCK, Sequence
from quire.sampling.params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 4, 8


def make_tables(window: int | None = None, num_blocks: int = NUM_BLOCKS) -> BlockTables:
    return BlockTables(BlockPool(num_blocks), BLOCK_SIZE, window)


def make_sequence(num_tokens: int, first_token: int = 0, **params: Any) -> Sequence:
    token_ids = list(range(first_token, first_token + num_tokens))
    return Sequence("r", token_ids, num_tokens, SamplingParams(**params), b"root")


def computed(tables: BlockTables, num_tokens: int) -> Sequence:
    """Return a sequence that has its blocks, of which the full ones are sealed."""
    sequence = make_sequence(num_tokens)
    tables.reserve(sequence)
    sequence.num_computed_tokens = sequence.num_tokens
    tables.seal(sequence)
    return sequence


@pytest.fixture
def tables() -> BlockTables:
    return make_tables()


def test_a_prefix_is_found_until_its_blocks_are_evicted(tables: BlockTables) -> None:
    first = computed(tables, 10)
    table = first.block_table[:]
    tables.free(first)
    assert tables.pool.counts == (6, 2, 0)
    second = make_sequence(12)
    tables.take_cached_prefix(second, max_tokens=11)
    assert second.block_table == table[:2]
    assert second.num_cached_tokens == second.num_computed_tokens == 8
    tables.free(second)
    tables.pool.allocate(NUM_BLOCKS)
    third = make_sequence(12)
    tables.take_cached_prefix(third, max_tokens=11)
    assert third.block_table == []


def test_the_last_token_of_a_prompt_is_not_taken_from_the_cache(tables: BlockTables) -> None:
    computed(tables, 8)
    again = make_sequence(8)
    tables.take_cached_prefix(again, max_tokens=7)
    assert again.num_cached_tokens == 4


def test_a_block_that_matches_in_part_is_found_if_copying_it_is_worthwhile(tables: BlockTables) -> None:
    first = computed(tables, 8)
    second = make_sequence(6)
    second.token_ids += [90, 91]
    tables.take_cached_prefix(second, max_tokens=7)
    hit = tables.partial_hit(second)
    assert hit == (first.block_table[1], 2)
    other = make_sequence(8, first_token=50)
    tables.take_cached_prefix(other, max_tokens=7)
    assert tables.partial_hit(other) is None


def test_equal_blocks_are_sealed_as_one(tables: BlockTables) -> None:
    first, second = make_sequence(8), make_sequence(8)
    for sequence in (first, second):
        tables.reserve(sequence)
    for sequence in (first, second):
        sequence.num_computed_tokens = 8
        tables.seal(sequence)
    assert first.block_table == second.block_table
    assert tables.pool.counts == (6, 0, 2)


def test_a_shared_block_is_replaced_before_it_is_written(tables: BlockTables) -> None:
    parent = computed(tables, 6)
    children = [tables.fork(parent, index) for index in (1, 2)]
    last = parent.block_table[1]
    assert tables.pool.ref_cnt(last) == 3
    tokens = [(each, 1) for each in (parent, *children)]
    # The last sequence that refers to the block keeps it.
    assert tables.num_appended_blocks(tokens) == 2
    copies = [tables.append(*each) for each in tokens]
    assert [copy and copy[0] for copy in copies] == [last, last, None]
    assert [each.block_table[1] for each in (parent, children[0])] == [copy[1] for copy in copies if copy]
    assert children[1].block_table[1] == last
    assert len({each.block_table[1] for each in (parent, *children)}) == 3
    assert tables.pool.counts.used == 1 + 3


def test_a_block_that_begins_with_the_next_token_is_not_copied(tables: BlockTables) -> None:
    parent = computed(tables, 8)
    child = tables.fork(parent, 1)
    assert tables.num_appended_blocks([(parent, 1), (child, 5)]) == 3
    assert tables.append(parent, 1) is None
    assert tables.append(child, 5) is None
    assert [len(each.block_table) for each in (parent, child)] == [3, 4]
    assert parent.block_table[:2] == child.block_table[:2]


def test_blocks_are_freed_with_their_last_sequence(tables: BlockTables) -> None:
    parent = computed(tables, 6)
    child = tables.fork(parent, 1)
    tables.free(parent)
    assert tables.pool.counts.used == 2
    tables.free(child)
    assert tables.pool.counts == (NUM_BLOCKS - 1, 1, 0)
    assert not parent.block_table


def test_an_append_without_enough_blocks_does_not_change_the_table() -> None:
    tables = make_tables(num_blocks=2)
    sequence = make_sequence(9)
    assert tables.num_missing(sequence) == 3
    with pytest.raises(NoFreeBlocksError):
        tables.reserve(sequence)
    assert not sequence.block_table
    assert tables.pool.counts.free == 2


def test_blocks_of_rejected_draft_tokens_are_freed(tables: BlockTables) -> None:
    sequence = computed(tables, 5)
    tables.append(sequence, 8)
    assert len(sequence.block_table) == 4
    tables.trim(sequence)
    assert len(sequence.block_table) == 2


def test_blocks_before_the_window_are_freed_and_stay_cached() -> None:
    tables = make_tables(window=5)
    sequence = computed(tables, 14)
    # The next token has position 14 and sees positions 10 to 14, which begin in the third block.
    tables.drop_unseen(sequence, sequence.num_computed_tokens)
    assert sequence.block_table[:2] == [NO_BLOCK, NO_BLOCK]
    assert len(sequence.held_blocks) == 2
    assert sequence.num_dropped_blocks == 2
    assert tables.pool.counts == (NUM_BLOCKS - 4, 2, 2)
    tables.free(sequence)
    assert tables.pool.counts.used == 0


def test_dropped_blocks_leave_gaps(tables: BlockTables) -> None:
    sequence = computed(tables, 12)
    held = sequence.block_table[1]
    tables.drop(sequence, [2, 0])
    assert sequence.block_table == [NO_BLOCK, held, NO_BLOCK]
    assert sequence.held_blocks == [held]


@pytest.mark.parametrize(
    ("window", "params", "expected"),
    [
        (None, {}, 5),
        # Two blocks of the prompt are shared; each sequence has three of its own.
        (None, {"n": 3}, 2 + 3 * 3),
        (5, {}, 3),
        (None, {"kv_budget_tokens": 12}, 3),
    ],
)
def test_the_most_blocks_of_a_request(window: int | None, params: dict[str, int], expected: int) -> None:
    tables = make_tables(window=window)
    assert tables.max_blocks(make_sequence(8, **params), num_tokens=18) == expected
