"""Blocks pinned for other workers: held, filled, and given back whatever happens."""

from __future__ import annotations

import pytest

from quire.engine.kv_cache.block_pins import BlockPins
from quire.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError

NUM_BLOCKS = 8


@pytest.fixture
def pool() -> BlockPool:
    """Return a pool that caches blocks a, b, c, and d."""
    pool = BlockPool(NUM_BLOCKS)
    table = pool.allocate(4)
    for block_id, name in zip(table, names("abcd"), strict=True):
        pool.seal(block_id, name)
    pool.free(table)
    return pool


def names(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def test_a_pinned_block_is_not_evicted(pool: BlockPool) -> None:
    pins = BlockPins(pool)
    assert len(pins.pin("p", names("abx"))) == 2
    with pytest.raises(NoFreeBlocksError):
        pool.allocate(NUM_BLOCKS - 1)
    table = pool.allocate(NUM_BLOCKS - 2)
    assert len(pool.look_up(names("abcd"))) == 2
    assert (pins.num_blocks, pool.counts.used) == (2, NUM_BLOCKS)
    pool.free(table)
    pins.unpin("p")
    pins.unpin("p")
    assert (pins.num_blocks, pool.counts.used) == (0, 0)
    pool.check_conservation()


def test_missing_blocks_are_not_pinned(pool: BlockPool) -> None:
    pins = BlockPins(pool)
    assert pins.pin("p", names("xab")) == []
    assert pins.block_ids == set()


def test_several_pins_of_a_block(pool: BlockPool) -> None:
    pins = BlockPins(pool)
    assert pins.pin("p", names("ab")) == pins.pin("q", names("ab"))
    pins.unpin("p")
    assert (pins.num_blocks, pool.counts.used) == (2, 2)
    pins.unpin("q")
    pool.check_conservation()


def test_filled_blocks_are_found_and_the_rest_is_free_again(pool: BlockPool) -> None:
    pins = BlockPins(pool)
    held = pins.pin("p", names("abcdef"))
    assert len(pins.reserve("p", 3)) == 3
    pins.seal("p", len(held), names("ef"))
    pins.unpin("p")
    assert len(pool.look_up(names("abcdefg"))) == 6
    assert pool.counts == (NUM_BLOCKS - 6, 6, 0)
    pool.check_conservation()


def test_a_block_that_was_computed_meanwhile_is_kept_once(pool: BlockPool) -> None:
    pins = BlockPins(pool)
    pins.pin("p", names("abcd"))
    pins.reserve("p", 1)
    [own] = pool.allocate(1)
    pool.seal(own, b"e")
    pins.seal("p", 4, names("e"))
    assert own in pins.block_ids
    pool.free([own])
    pins.unpin("p")
    assert pool.counts == (NUM_BLOCKS - 5, 5, 0)
    pool.check_conservation()


def test_too_few_blocks_change_nothing(pool: BlockPool) -> None:
    pins = BlockPins(pool)
    pins.pin("p", names("ab"))
    with pytest.raises(NoFreeBlocksError):
        pins.reserve("p", NUM_BLOCKS - 1)
    assert pins.num_blocks == 2
    pins.unpin("p")
    assert pool.counts.used == 0
