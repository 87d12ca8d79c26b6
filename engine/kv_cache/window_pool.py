"""The ledger of blocks with two parts: the part of the layers with a window is freed before the other.

::

                         frames of the lasting part    frames of the window part
    whole, in use        in use                        in use
    whole, passed        in use                        idle: taken when frames are needed
    bare                 in use                        none

A reader *passes* a block when none of its later tokens sees the block in a layer with a window. When all
readers of a block have passed it, the frames of its window part are idle. They keep their content until they
are taken for other blocks, since a prompt may still begin there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.engine.kv_cache.block_pool import (
    BlockCounts,
    BlockListener,
    BlockPool,
    LowerTiers,
    NoFreeBlocksError,
)
from quire.engine.kv_cache.memory import NO_FRAME, FrameTables, KvMemory


def pool_of(
    memory: KvMemory, listener: BlockListener | None = None, lower: LowerTiers | None = None
) -> BlockPool:
    """Return the ledger of a memory's blocks."""
    if memory.frame_tables is None:
        return BlockPool(memory.num_blocks, listener, lower)
    return WindowPool(memory, memory.frame_tables, listener, lower)


class WindowPool(BlockPool):
    """Allocates blocks of frames.

    Numbers of blocks, as in ``counts``, are numbers of whole blocks with as many frames. A hash is found as
    the end of a prefix only if the blocks that a window shows there are whole.

    Args:
        memory: the blocks.
        frame_tables: the frames of each block, which only this pool changes.
    """

    def __init__(
        self,
        memory: KvMemory,
        frame_tables: FrameTables,
        listener: BlockListener | None = None,
        lower: LowerTiers | None = None,
    ) -> None:
        super().__init__(len(frame_tables), listener, lower)
        self.num_blocks = memory.num_blocks
        self._tables = frame_tables
        self._shape = memory.shape
        self._size, self._bare_size = memory.shape.num_frames, memory.shape.lasting_frames
        self._num_frames = memory.num_blocks * self._size
        self._num_needed_frames = 0
        self._free_frames = list(reversed(range(self._num_frames)))
        # Here ``_unused`` has only cached blocks. Empty ones have no frames, and their order does not matter.
        self._empty = list(self._unused)
        self._unused.clear()
        self._is_whole = [False] * len(frame_tables)
        self._num_passed = [0] * len(frame_tables)
        self._num_needed = [0] * len(frame_tables)
        """For each block, how many of its frames its readers need."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks with an idle window part; the first one loses it first."""
        self._idle_starts: OrderedDict[int, None] = OrderedDict()
        """Those of them that are in ``_starts``."""
        self._starts: set[int] = set()
        """Blocks before a position from which a prompt could go on: other prompts may do so there, too."""

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        num_free, num_allocatable = len(self._free_frames) // self._size, self.num_allocatable
        return BlockCounts(num_free, num_allocatable - num_free, self.num_blocks - num_allocatable)

    @property
    def num_allocatable(self) -> int:
        """Whole blocks that an allocation can take."""
        return (self._num_frames - self._num_needed_frames) // self._size

    @property
    def num_in_use(self) -> int:
        """Number of block ids with a reference."""
        return len(self._tables) - len(self._unused) - len(self._empty)

    def size_of(self, num_blocks: int, num_bare: int) -> int:
        """Return the size of some blocks, the last of which are whole, as a number of whole blocks."""
        return -(-self._frames_for(num_blocks, num_bare) // self._size)

    def _frames_for(self, num_blocks: int, num_bare: int) -> int:
        return num_blocks * self._size - num_bare * (self._size - self._bare_size)

    def allocate(self, num_blocks: int, num_bare: int = 0) -> list[int]:
        """Allocate blocks with one reference each; the first ``num_bare`` of them are bare.

        Idle window parts are taken first, then the least recently used cached blocks, and at last the idle
        window parts from which prompts could go on.

        Raises:
            NoFreeBlocksError: there are too few frames.
        """
        num_frames = self._frames_for(num_blocks, num_bare)
        if num_frames > self._num_frames - self._num_needed_frames:
            num_needed, num_left = self.size_of(num_blocks, num_bare), self.num_allocatable
            raise NoFreeBlocksError(f"{num_needed} blocks needed, {num_left} of {self.num_blocks} left")
        self._reclaim(num_frames)
        block_ids = [self._empty.pop() for _ in range(num_blocks)]
        for index, block_id in enumerate(block_ids):
            self._is_whole[block_id] = index >= num_bare
            number = self._size if index >= num_bare else self._bare_size
            self._tables[block_id] = NO_FRAME
            self._tables[block_id, :number] = [self._free_frames.pop() for _ in range(number)]
            self._ref_cnt[block_id] = 1
            self._generation[block_id] += 1
            self._recount(block_id)
        return block_ids

    def allocate_prefix(self, num_blocks: int) -> list[int]:
        """Allocate blocks of which only those are whole that a window shows at their end."""
        return self.allocate(num_blocks, self._shape.num_bare(num_blocks))

    def _reclaim(self, num_frames: int) -> None:
        """Take idle window parts and evict cached blocks until there are ``num_frames`` free frames."""
        evicted: list[tuple[int, bytes]] = []
        while len(self._free_frames) < num_frames:
            if not self._idle and self._unused:
                block_hash = self._hash_of[next(iter(self._unused))]
                assert block_hash is not None
                evicted += self._forget(block_hash)
            else:
                stripped = next(iter(self._idle or self._idle_starts))
                if self._lower and (stripped_hash := self._hash_of[stripped]) is not None:
                    self._lower.on_block_stripped(stripped, stripped_hash)
                self._strip(stripped)
        # The frames of evicted blocks hold their content until they are written again.
        self._tell_evicted(evicted)

    def _strip(self, block_id: int) -> None:
        """Free the window part of a block."""
        self._free_frames += self._tables[block_id, self._bare_size :].tolist()
        self._tables[block_id, self._bare_size :] = NO_FRAME
        self._is_whole[block_id] = False
        self._recount(block_id)

    def _recount(self, block_id: int) -> None:
        """Record which frames of a block are needed or idle, after a change of its readers or frames."""
        num_readers, is_whole = self._ref_cnt[block_id], self._is_whole[block_id]
        is_passed = num_readers == self._num_passed[block_id]
        needed = self._size if is_whole and not is_passed else self._bare_size
        needed = needed if num_readers else 0
        self._num_needed_frames += needed - self._num_needed[block_id]
        self._num_needed[block_id] = needed
        was_idle = block_id in self._idle or block_id in self._idle_starts
        self._idle.pop(block_id, None)
        self._idle_starts.pop(block_id, None)
        # The window part of a cached block is idle only if it was so before its last reader left.
        if is_whole and (is_passed if num_readers else was_idle):
            (self._idle_starts if block_id in self._starts else self._idle)[block_id] = None

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block; a cached block becomes used again."""
        super().share(block_ids)
        for block_id in block_ids:
            self._recount(block_id)

    def pass_by(self, block_ids: Sequence[int]) -> None:
        """Record for one reader of each block that its window has left the block behind."""
        for block_id in block_ids:
            self._num_passed[block_id] += 1
            self._recount(block_id)

    def free(self, block_ids: Sequence[int], num_passed: int = 0) -> None:
        """Drop a reference to each block of a table, whose reader has passed the first ``num_passed``."""
        for block_id in block_ids[:num_passed]:
            self._num_passed[block_id] -= 1
        super().free(block_ids)
        for block_id in block_ids:
            if block_id in self._unused and self._hash_of[block_id] is None:
                self._empty_block(block_id)
            self._recount(block_id)

    def _empty_block(self, block_id: int) -> None:
        """Free the frames of a block that is neither used nor cached."""
        self._free_frames += self._frames(block_id)
        self._is_whole[block_id] = False
        self._starts.discard(block_id)
        del self._unused[block_id]
        self._empty.append(block_id)

    def _forget(self, block_hash: bytes) -> list[tuple[int, bytes]]:
        forgotten = super()._forget(block_hash)
        for block_id, _ in forgotten:
            if block_id in self._unused:
                self._empty_block(block_id)
                self._recount(block_id)
        return forgotten

    def places(self, block_ids: Iterable[int]) -> list[int]:
        """Return the frames of some blocks, which others may get once the blocks are free."""
        return [frame for block_id in block_ids for frame in self._frames(block_id)]

    def copies(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the copies of frames that copy blocks."""
        return [
            frames
            for source, target in pairs
            for frames in zip(self._frames(source), self._frames(target), strict=False)
        ]

    def copies_to_host(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the copies of the frames that both blocks have; host blocks are whole."""
        return [
            (frame, host_id * self._size + index)
            for block_id, host_id in pairs
            for index, frame in enumerate(self._frames(block_id))
        ]

    def _frames(self, block_id: int) -> list[int]:
        number = self._size if self._is_whole[block_id] else self._bare_size
        frames: list[int] = self._tables[block_id, :number].tolist()
        return frames

    def clear_cache(self) -> None:
        """Forget the hashes of all cached blocks, which become free, and free the idle window parts."""
        super().clear_cache()
        for block_id in [*self._idle, *self._idle_starts]:
            self._strip(block_id)

    def seal(self, block_id: int, block_hash: bytes, parent_hash: bytes | None = None) -> int:
        """Record that a block is full; see ``BlockPool.seal``. A bare duplicate gets the window part."""
        known = self._block_of.get(block_hash, block_id)
        is_known = known != block_id and (parent_hash is None or parent_hash in self._block_of)
        if is_known and self._is_whole[block_id] > self._is_whole[known] and self._ref_cnt[block_id] == 1:
            self._tables[known, self._bare_size :] = self._tables[block_id, self._bare_size :]
            self._tables[block_id, self._bare_size :] = NO_FRAME
            self._is_whole[known], self._is_whole[block_id] = True, False
            self._generation[known] += 1
            self._recount(known)
            self._recount(block_id)
        return super().seal(block_id, block_hash, parent_hash)

    def look_up(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix in the pool after which a sequence can go on.

        This takes no reference: call ``share`` before the next allocation.
        """
        block_ids = super().look_up(block_hashes)
        num_usable = num_whole = 0
        for number, block_id in enumerate(block_ids, start=1):
            num_whole = num_whole + 1 if self._is_whole[block_id] else 0
            if num_whole >= min(number, self._shape.window_blocks):
                num_usable = number
        return block_ids[:num_usable]

    def note_start(self, block_hashes: Sequence[bytes]) -> None:
        """Keep the window parts of the last cached blocks of a prompt longer than others."""
        for block_id in super().look_up(block_hashes)[-self._shape.window_blocks :]:
            self._starts.add(block_id)
            self._recount(block_id)

    def check_conservation(self) -> None:
        """Raise AssertionError unless the ledger is consistent."""
        held = [block_id for block_id, count in enumerate(self._ref_cnt) if count or block_id in self._unused]
        assert sorted([*held, *self._empty]) == list(range(len(self._tables))), "block ids are lost"
        assert all(self._ref_cnt[each] == 0 and self._hash_of[each] for each in self._unused)
        frames = [frame for each in held for frame in self._tables[each].tolist() if frame != NO_FRAME]
        assert sorted([*frames, *self._free_frames]) == list(range(self._num_frames)), "frames are lost"
        for each in held:
            assert self._is_whole[each] == (self._tables[each, -1] != NO_FRAME)
            assert 0 <= self._num_passed[each] <= self._ref_cnt[each]
        assert self._num_needed_frames == sum(self._num_needed), "the number of needed frames is wrong"
        assert self._block_of == {h: i for i, h in enumerate(self._hash_of) if h is not None}
