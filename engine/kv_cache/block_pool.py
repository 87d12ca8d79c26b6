"""The ledger of KV blocks: their reference counts, their hashes and the order of eviction.

It knows only block ids; the memory behind them is in ``memory.py``. A block is in one of three states:

====== ======= ============= ===========================================
state  ref_cnt has a hash    meaning
====== ======= ============= ===========================================
used   > 0     if full       one or more sequences read it
cached 0       yes           no sequence reads it; a prefix hit revives it
free   0       no            holds nothing
====== ======= ============= ===========================================

At all times free + cached + used = total. A block with a hash is full and is never written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class NoFreeBlocksError(Exception):
    """The pool has too few free and cached blocks for an allocation; nothing was taken."""


class BlockListener(Protocol):
    """Is notified of changes to the cached block hashes.

    It is called in the engine's thread and must not block.
    """

    def stored(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        """Record that consecutive blocks of a prompt became reusable.

        ``parent_hash`` is the hash of the block before the first one; None if the first one begins a prompt.
        """

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Record that blocks were evicted; children are listed before their parents."""


class LowerTiers(Protocol):
    """The cache tiers that may keep evicted blocks.

    If they exist, they call the listener and the pool does not.
    """

    def on_block_sealed(self, block_hash: bytes, parent_hash: bytes | None) -> None:
        """Record that a block of the pool became reusable."""

    def on_blocks_evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Take over blocks (id, hash) that the pool evicts; children are listed before their parents.

        The blocks of the pool hold their content until this call returns.
        """

    def on_block_stripped(self, block_id: int, block_hash: bytes) -> None:
        """Copy a block whose window part the pool frees; it holds its content until this call returns."""

    def on_blocks_forgotten(self, block_hashes: Sequence[bytes]) -> None:
        """Record that the pool has dropped the content of these blocks."""


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
        self._generation = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._parent_of: dict[bytes, bytes] = {}
        self._children: dict[bytes, set[bytes]] = {}
        # Blocks without references. The first one is reused next. An OrderedDict is a doubly linked list with
        # O(1) removal from the middle, which a prefix hit needs. Empty blocks go to its front, so no reusable
        # block is evicted while an empty one is left. A table's last blocks are freed first. The order is
        # thus LRU, and a child is evicted before its parent.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_cached = 0

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        num_unused = len(self._unused)
        return BlockCounts(num_unused - self._num_cached, self._num_cached, self.num_blocks - num_unused)

    @property
    def num_allocatable(self) -> int:
        """Blocks that an allocation can take: free ones, then cached ones."""
        return len(self._unused)

    @property
    def num_in_use(self) -> int:
        """Number of block ids with a reference."""
        return self.counts.used

    def ref_cnt(self, block_id: int) -> int:
        """Return how many block tables hold the block."""
        return self._ref_cnt[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks with one reference each; evict the least recently used cached blocks if necessary.

        Raises:
            NoFreeBlocksError: fewer than ``num_blocks`` blocks have no references.
        """
        if num_blocks > len(self._unused):
            raise NoFreeBlocksError(
                f"{num_blocks} blocks needed, {len(self._unused)} of {self.num_blocks} left"
            )
        block_ids = [self._unused.popitem(last=False)[0] for _ in range(num_blocks)]
        evicted: list[tuple[int, bytes]] = []
        for block_id in block_ids:
            if (block_hash := self._hash_of[block_id]) is not None:
                evicted += self._forget(block_hash)
        for block_id in block_ids:
            self._ref_cnt[block_id] = 1
            self._generation[block_id] += 1
        self._tell_evicted(evicted)
        return block_ids

    def allocate_prefix(self, num_blocks: int) -> list[int]:
        """Allocate blocks for a part of a prompt after which sequences will go on.

        Raises:
            NoFreeBlocksError: there are too few blocks.
        """
        return self.allocate(num_blocks)

    def places(self, block_ids: Iterable[int]) -> list[int]:
        """Return where some blocks lie in the memory; a block may have several places, or others later."""
        return list(block_ids)

    def copies(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the copies between the places of blocks, given as (from, to)."""
        return list(pairs)

    def copies_to_host(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the copies between the places of blocks and of host blocks, given as (block, host block)."""
        return list(pairs)

    def _forget(self, block_hash: bytes) -> list[tuple[int, bytes]]:
        """Forget the hashes of a block and of all its descendants; return ids and hashes, children first.

        A sequence that freed its first blocks may still hold later blocks, but no prompt can find those any
        more.
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
        """Add a reference to each block; a cached block becomes used again."""
        for block_id in block_ids:
            if self._ref_cnt[block_id] == 0:
                del self._unused[block_id]
                self._num_cached -= 1
            self._ref_cnt[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table, given in table order; full blocks stay cached."""
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
        """Record that a block is full and return the block to use instead of it.

        If another block holds the same tokens after the same prefix, the caller's reference moves to it and
        the duplicate is freed. Each hash thus has only one block, and a cached child never outlives its
        parent. A block whose parent is not in the pool gets no hash, since no prompt could find it.

        Args:
            block_id: the full block.
            block_hash: its hash.
            parent_hash: hash of the block before it; None if it is a prompt's first block.
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
                self._lower.on_block_sealed(block_hash, parent_hash)
            elif self._listener:
                self._listener.stored([block_hash], parent_hash)
        return block_id

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Forget the hashes of some blocks and their descendants, so that no prompt finds them any more."""
        removed: list[bytes] = []
        for block_hash in block_hashes:
            if block_hash in self._block_of:
                removed += [forgotten for _, forgotten in self._forget(block_hash)]
        self._tell_removed(removed)

    def is_shared(self, block_hash: bytes, child_hash: bytes | None) -> bool:
        """Return whether a table holds a block, or another block than ``child_hash`` follows it."""
        block_id = self._block_of.get(block_hash)
        is_held = block_id is not None and self._ref_cnt[block_id] > 0
        return is_held or bool(self._children.get(block_hash, set()) - {child_hash})

    def hash_of(self, block_id: int) -> bytes | None:
        """Return the hash of a block; None if it is not full, or if its parent has left the pool."""
        return self._hash_of[block_id]

    def generation(self, block_id: int) -> int:
        """Return how often the block was allocated.

        While this number is unchanged, a sealed block keeps its bytes.
        """
        return self._generation[block_id]

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_of

    def look_up(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix in the pool.

        This takes no reference: call ``share`` before the next allocation.
        """
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def clear_cache(self) -> None:
        """Forget the hashes of all cached blocks, which become free."""
        removed: list[bytes] = []
        for block_id in list(self._unused):
            if (block_hash := self._hash_of[block_id]) is not None:
                removed += [forgotten for _, forgotten in self._forget(block_hash)]
        self._tell_removed(removed)

    def _tell_evicted(self, blocks: list[tuple[int, bytes]]) -> None:
        if blocks and self._lower:
            self._lower.on_blocks_evicted(blocks)
        elif blocks and self._listener:
            self._listener.removed([block_hash for _, block_hash in blocks])

    def _tell_removed(self, block_hashes: list[bytes]) -> None:
        if block_hashes and self._lower:
            self._lower.on_blocks_forgotten(block_hashes)
        elif block_hashes and self._listener:
            self._listener.removed(block_hashes)

    def check_conservation(self) -> None:
        """Raise AssertionError unless the ledger is consistent."""
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
