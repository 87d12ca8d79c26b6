"""The end of a chain is forgotten in all tiers, and nothing that a sequence or another chain needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.tiers import CacheTiers, forget_tail
from quire.kvindex.kv_layout import KvShape

NUM_POOL, NUM_HOST = 8, 6
SHAPE = KvShape(1, 1, 4, 4, "float32")
CPU = torch.device("cpu")

words = st.text("ab", min_size=1, max_size=5)


def chain(word: str) -> list[bytes]:
    """Return the hashes of a word's blocks: the words that it begins with."""
    return [word[: length + 1].encode() for length in range(len(word))]


class Worker:
    """A pool, with host memory below it or without, and what both together hold."""

    def __init__(self, has_host: bool) -> None:
        self.held: set[bytes] = set()
        self.tiers: CacheTiers | None = None
        if has_host:
            host = HostCache(KvMemory(SHAPE, NUM_HOST, CPU))
            self.tiers = CacheTiers(KvMemory(SHAPE, NUM_POOL, CPU), host, listener=self)
        self.pool = BlockPool(NUM_POOL, self, self.tiers)

    def stored(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        self.held.update(block_hashes)

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        self.held.difference_update(block_hashes)

    def compute(self, word: str) -> list[int]:
        """Return a table with the word's blocks; none if there is no room."""
        hashes = chain(word)
        table = self.pool.look_up(hashes)
        self.pool.share(table)
        num_found = len(table)
        if len(hashes) - num_found > self.pool.num_allocatable:
            self.pool.free(table)
            return []
        table += self.pool.allocate(len(hashes) - num_found)
        for index in range(num_found, len(table)):
            parent = hashes[index - 1] if index else None
            table[index] = self.pool.seal(table[index], hashes[index], parent)
        return table

    def forget(self, word: str, num_kept: int = 0) -> int:
        return forget_tail(self.pool, self.tiers, chain(word), num_kept)

    def check(self) -> None:
        self.pool.check_conservation()
        if self.tiers is not None:
            self.tiers.check_conservation(self.pool)


@given(
    has_host=st.booleans(),
    cached=st.lists(words, max_size=8),
    running=st.lists(words, max_size=2),
    ended=words,
    num_kept=st.integers(0, 5),
)
def test_only_blocks_of_no_further_use_are_forgotten(
    has_host: bool, cached: list[str], running: list[str], ended: str, num_kept: int
) -> None:
    worker = Worker(has_host)
    tables = [worker.compute(word) for word in running]
    for word in cached:
        worker.pool.free(worker.compute(word))
    before = set(worker.held)
    num_forgotten = worker.forget(ended, num_kept)
    worker.check()
    forgotten = before - worker.held
    assert len(forgotten) == num_forgotten
    assert forgotten <= set(chain(ended)[num_kept:])
    for each in forgotten:
        others = {other for other in before if other.startswith(each)} - set(chain(ended))
        assert not others, "another chain has lost its parent"
    for word, table in zip(running, tables, strict=True):
        assert not table or worker.pool.look_up(chain(word)) == table, "a running sequence has lost a block"
    for table in tables:
        worker.pool.free(table)
    worker.pool.allocate(NUM_POOL)


@pytest.mark.parametrize("has_host", [False, True])
def test_an_ended_chain_keeps_its_beginning_and_its_branches(has_host: bool) -> None:
    worker = Worker(has_host)
    for word in ("aaaaa", "aab"):
        worker.pool.free(worker.compute(word))
    assert worker.forget("aaaaa", num_kept=1) == 3
    assert worker.held == {b"a", b"aa", b"aab"}
    assert worker.forget("aab", num_kept=1) == 2
    assert worker.held == {b"a"}


def test_blocks_that_have_left_the_pool_are_forgotten_in_host_memory_too() -> None:
    worker = Worker(has_host=True)
    worker.pool.free(worker.compute("abab"))
    worker.pool.free(worker.pool.allocate(NUM_POOL))
    assert worker.pool.counts.cached == 0
    assert worker.held == set(chain("abab"))
    assert worker.forget("abab", num_kept=1) == 3
    worker.check()
    assert worker.held == {b"a"}
