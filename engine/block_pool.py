"""The ledger of KV blocks: who uses them, what they hold, which goes next.

It knows block ids only; the memory behind them is in ``kv_memory``. A block is in one of three states:

====== ======= ============= ===========================================
state  ref_cnt has a hash    meaning
====== ======= ============= ===========================================
used   > 0     if full       one or more sequences read it
cached 0       yes           nobody reads it; a prefix hit revives it
free   0       no            holds nothing
====== ======= ============= ===========================================

free + cached + used = total, always. A block with a hash is full and is never written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class NoFreeBlocksError(Exception):
    """The pool has too few free and cached blocks for an allocation; nothing was taken."""


class BlockListener(Protocol):
    """Hears which block hashes the pool holds. Called from the engine's thread; must not block."""

    def stored(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        """Blocks of a chain became reusable, one after the other; no parent: they begin a prompt."""

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Blocks were evicted, children before parents."""


class LowerTiers(Protocol):
    """Where evicted blocks may live on; it tells the listener in the pool's place."""

    def sealed(self, block_hash: bytes, parent_hash: bytes | None) -> None:
        """A block of the pool became reusable."""

    def evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Blocks (id, hash), children before parents, leave the pool; they hold their content until then."""

    def forgotten(self, block_hashes: Sequence[bytes]) -> None:
        """What these blocks of the pool held is not wanted any more."""


class BlockCounts(NamedTuple):
    """How many blocks are in each state."""

    free: int
    cached: int
    used: int


class BlockPool:
    """Allocates blocks, counts their references and finds them by hash."""

    def __init__(
        self, num_blocks: int, listener: BlockListener | None = None, lower: LowerTiers | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._listener = listener
        self._lower = lower
        self._ref_cnt = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes] = {}
        self._children: dict[bytes, set[bytes]] = {}
        # Blocks with no references, the next to be reused first: an OrderedDict is a doubly linked list with
        # O(1) removal from the middle, which a prefix hit needs. Empty blocks go to its front, so nothing
        # reusable is evicted while a block without content is left. Tables are freed from their ends, so
        # the order is LRU and a child goes before its parent.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_cached = 0

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        num_unused = len(self._unused)
        return BlockCounts(num_unused - self._num_cached, self._num_cached, self.num_blocks - num_unused)

    @property
    def num_allocatable(self) -> int:
        """Blocks that an allocation can take: free ones, then cached ones."""
        return len(self._unused)

    def ref_cnt(self, block_id: int) -> int:
        """Return how many block tables hold the block."""
        return self._ref_cnt[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one reference each, evicting the least recently used cached ones if need be.

        Raises:
            NoFreeBlocksError: fewer than ``num_blocks`` are without references.
        """
        if num_blocks > len(self._unused):
            raise NoFreeBlocksError(
                f"{num_blocks} blocks wanted, {len(self._unused)} of {self.num_blocks} left"
            )
        block_ids = [self._unused.popitem(last=False)[0] for _ in range(num_blocks)]
        evicted: list[tuple[int, bytes]] = []
        for block_id in block_ids:
            if (block_hash := self._hash_of[block_id]) is not None:
                evicted += self._forget(block_hash)
        for block_id in block_ids:
            self._ref_cnt[block_id] = 1
        if evicted and self._lower:
            self._lower.evicted(evicted)
        elif evicted and self._listener:
            self._listener.removed([block_hash for _, block_hash in evicted])
        return block_ids

    def _forget(self, block_hash: bytes) -> list[tuple[int, bytes]]:
        """Forget what a block holds, and all that follows it; return ids and hashes, children first.

        A sequence that gave its first blocks back may hold later ones still: nobody can find them any more.
        """
        family = [block_hash]
        for member in family:
            family += self._children.get(member, ())
        family.reverse()
        forgotten = [(self._block_of.pop(member), member) for member in family]
        for block_id, member in forgotten:
            self._hash_of[block_id] = None
            if self._ref_cnt[block_id] == 0:
                self._num_cached -= 1
                if block_id in self._unused:
                    self._unused.move_to_end(block_id, last=False)
            if (parent := self._parent_of.pop(member, None)) is not None:
                self._children[parent].remove(member)
                if not self._children[parent]:
                    del self._children[parent]
        return forgotten

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, reviving cached ones."""
        for block_id in block_ids:
            if self._ref_cnt[block_id] == 0:
                del self._unused[block_id]
                self._num_cached -= 1
            self._ref_cnt[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table, given in table order."""
        for block_id in reversed(block_ids):
            self._ref_cnt[block_id] -= 1
            if self._ref_cnt[block_id] < 0:
                raise AssertionError(f"block {block_id} was freed more often than taken")
            if self._ref_cnt[block_id] == 0:
                self._unused[block_id] = None
                if self._hash_of[block_id] is None:
                    self._unused.move_to_end(block_id, last=False)
                else:
                    self._num_cached += 1

    def seal(self, block_id: int, block_hash: bytes, parent_hash: bytes | None = None) -> int:
        """Record that a block is full and return the block to use in its place.

        Without a parent it is the first block of a prompt.

        If another block holds the same tokens after the same prefix, the caller's reference moves to it and
        the duplicate is freed: one hash has one block, so a cached child never outlives its parent. A block
        whose parent is not held gets no hash, since nobody could find it.

        Args:
            parent_hash: that of the block before it; None if it is a prompt's first.
        """
        if parent_hash is not None and parent_hash not in self._block_of:
            return block_id
        known = self._block_of.get(block_hash)
        if known is not None and known != block_id:
            self.share([known])
            self.free([block_id])
            return known
        if known is None:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash
            if parent_hash is not None:
                self._parent_of[block_hash] = parent_hash
                self._children.setdefault(parent_hash, set()).add(block_hash)
            if self._lower:
                self._lower.sealed(block_hash, parent_hash)
            elif self._listener:
                self._listener.stored([block_hash], parent_hash)
        return block_id

    def hash_of(self, block_id: int) -> bytes | None:
        """Return what a block holds; None if it is not full, or cannot be found."""
        return self._hash_of[block_id]

    def look_up(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest held prefix. Takes no reference: share them before allocating."""
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def clear_cache(self) -> None:
        """Forget what the cached blocks hold."""
        removed: list[bytes] = []
        for block_id in list(self._unused):
            if (block_hash := self._hash_of[block_id]) is not None:
                removed += [forgotten for _, forgotten in self._forget(block_hash)]
        if removed and self._lower:
            self._lower.forgotten(removed)
        elif removed and self._listener:
            self._listener.removed(removed)

    def check_conservation(self) -> None:
        """Raise AssertionError unless the ledger agrees with itself."""
        unused = {block_id for block_id, count in enumerate(self._ref_cnt) if count == 0}
        cached = {block_id for block_id in unused if self._hash_of[block_id] is not None}
        assert unused == set(self._unused), "the list of unused blocks disagrees with the reference counts"
        assert len(cached) == self._num_cached, "the number of cached blocks is wrong"
        assert self._block_of == {h: i for i, h in enumerate(self._hash_of) if h is not None}, (
            "hashes disagree"
        )
        assert self._parent_of.keys() | self._parent_of.values() <= self._block_of.keys(), "orphaned blocks"
        links = {(child, parent) for parent, children in self._children.items() for child in children}
        assert links == set(self._parent_of.items()), "the links between blocks disagree"
