"""The block ledger under random schedules of allocate, share, seal, free."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from quire.engine.sequences.sequence import NO_BLOCK

NUM_BLOCKS = 12


class Published:
    """What a listener has heard; checks that it stays closed under prefixes."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.evicted: list[bytes] = []
        self.evicted_from: set[bytes] = set()

    def stored(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        for block_hash in block_hashes:
            assert len(block_hash) == 1 or block_hash[:-1] in self.hashes, "a child came before its parent"
            self.hashes.add(block_hash)

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        for block_hash in block_hashes:
            self.hashes.remove(block_hash)
            is_parent = any(h[:-1] == block_hash for h in self.hashes)
            assert not is_parent, "a parent went before its child"
        self.evicted += block_hashes


class PoolMachine(RuleBasedStateMachine):
    """Tables are prefixes of words over {a, b}; a block's hash is the word up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.published = Published()
        self.pool = BlockPool(NUM_BLOCKS, self.published)
        self.tables: list[tuple[bytes, list[int], int]] = []
        self.unused: list[bytes] = []
        """Cached hashes, those freed first first; of one table's, the last block's first."""

    @rule(word=st.text("ab", min_size=1, max_size=5).map(str.encode))
    def start(self, word: bytes) -> None:
        hashes = [word[: i + 1] for i in range(len(word))]
        hits = self.pool.look_up(hashes)
        num_new = len(word) - len(hits)
        self.pool.share(hits)
        self.unused = [each for each in self.unused if each not in hashes[: len(hits)]]
        num_evicted = max(0, num_new - self.pool.counts.free)
        self.published.evicted.clear()
        self.published.evicted_from = set(self.published.hashes)
        try:
            table = hits + self.pool.allocate(num_new)
        except NoFreeBlocksError:
            self.free(word, hits, len(hits))
            return
        oldest = self.unused[:num_evicted]
        evicted = {each for each in self.published.evicted_from if any(map(each.startswith, oldest))}
        assert set(self.published.evicted) == evicted, "not the least recently used, and what follows them"
        self.unused = [each for each in self.unused if each not in evicted]
        self.tables.append((word, table, len(hits)))

    def free(self, word: bytes, table: list[int], num_sealed: int) -> None:
        named = [word[:i] for i in range(num_sealed, 0, -1) if self.names(table[i - 1], word[:i])]
        self.pool.free([block_id for block_id in table if block_id != NO_BLOCK])
        self.unused += [each for each in named if self.pool.ref_cnt(*self.pool.look_up([each])) == 0]

    def names(self, block_id: int, block_hash: bytes) -> bool:
        """Whether a block has its hash still: it is lost with that of a block before it."""
        return self.pool.look_up([block_hash]) == [block_id]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def seal_next(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        word, table, num_sealed = self.tables[index]
        if num_sealed < len(word):
            block_hash = word[: num_sealed + 1]
            parent_hash = word[:num_sealed] or None
            table[num_sealed] = self.pool.seal(table[num_sealed], block_hash, parent_hash)
            assert (block_hash in self.published.hashes) == (parent_hash in {None, *self.published.hashes})
            self.unused = [each for each in self.unused if each != block_hash]
            self.tables[index] = (word, table, num_sealed + 1)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.free(*self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_the_first_block_back(self, data: st.DataObject) -> None:
        """Free a block as a sequence does when only its last tokens are attended to."""
        index = data.draw(st.integers(0, len(self.tables) - 1))
        word, table, num_sealed = self.tables[index]
        num_dropped = table.count(NO_BLOCK)
        if num_dropped < num_sealed:
            given_back = [NO_BLOCK] * num_dropped + [table[num_dropped]]
            table[num_dropped] = NO_BLOCK
            self.free(word, given_back, len(given_back))

    @invariant()
    def conserved(self) -> None:
        self.pool.check_conservation()
        counts = self.pool.counts
        assert sum(counts) == NUM_BLOCKS
        assert counts.used == len({block for _, table, _ in self.tables for block in table} - {NO_BLOCK})
        assert counts.cached == len(self.unused)

    @invariant()
    def unsealed_blocks_have_one_owner(self) -> None:
        for _, table, num_sealed in self.tables:
            assert all(self.pool.ref_cnt(block) == 1 for block in table[num_sealed:])

    def teardown(self) -> None:
        for each in self.tables:
            self.free(*each)
        assert self.pool.counts.used == 0


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_a_block_freed_twice_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.free(blocks)


def test_a_cleared_cache_is_empty_and_its_blocks_are_unpublished() -> None:
    published = Published()
    pool = BlockPool(4, published)
    blocks = pool.allocate(2)
    for block_id, block_hash in zip(blocks, (b"a", b"ab"), strict=True):
        pool.seal(block_id, block_hash)
    pool.free(blocks)
    pool.clear_cache()
    pool.check_conservation()
    assert pool.counts == (4, 0, 0)
    assert not published.hashes
    assert pool.look_up([b"a"]) == []


def test_a_forgotten_block_is_found_no_more_and_neither_are_its_children() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.seal(first, b"first")
    pool.seal(second, b"second", b"first")
    pool.forget([b"first", b"second", b"never here"])
    assert pool.look_up([b"first", b"second"]) == []
    pool.check_conservation()
    pool.free([first, second])
    assert pool.counts.free == 4


def test_a_block_gets_a_new_generation_when_it_is_allocated() -> None:
    pool = BlockPool(1)
    [block_id] = pool.allocate(1)
    before = pool.generation(block_id)
    pool.share([block_id])
    pool.free([block_id, block_id])
    assert pool.generation(block_id) == before
    assert pool.allocate(1) == [block_id]
    assert pool.generation(block_id) == before + 1
