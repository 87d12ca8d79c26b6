"""The prefix cache below the pool: evicted blocks move to host memory, and from there to disk.

::

    pool  --evicted-->  host  --evicted-->  disk  --evicted-->  gone
          <--promoted-        <--promoted-

A block is in the pool or in host memory, never in both, unless the pool has freed a part of it. When it is
read from disk, its file is kept. The listener is notified when the first tier gets a block, and when the
last tier drops it. Each tier evicts its least recently used block first. Children are marked as used before
their parents, so they are evicted first. If a block is lost before its children because its file cannot be
written or read, the children are dropped with it. Every cached block thus has its whole prefix cached.

Eviction copies a block immediately, because the block's next user may write it from another thread. The copy
back into the pool is planned with the step's other moves, or made immediately between two steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from quire.engine.kv_cache.block_pool import BlockListener, BlockPool
from quire.engine.kv_cache.disk_cache import STALLED, DiskCache, Finished
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.prefix_tree import PrefixTree

MAX_LOADING_SHARE = 0.5
"""Largest share of host memory for blocks that are being read from disk."""


@dataclass(slots=True)
class TierCounts:
    """Counts the operations of the tiers, in blocks, by tier or by the reason of a disk error."""

    hits: Counter[str] = field(default_factory=Counter)
    """Blocks that prompts did not have to compute, by the tier that had them."""
    demotions: Counter[str] = field(default_factory=Counter)
    """Evicted blocks by the tier that they moved to; "gone" if no tier took them."""
    promotions: Counter[str] = field(default_factory=Counter)
    """Blocks that moved up a tier, by the tier that they moved from."""
    disk_errors: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, slots=True)
class Prefetch:
    """Blocks of one chain that are being read from disk into host memory.

    Attributes:
        chain: hashes of the chain's blocks that are in any tier.
        num_left: blocks that have not arrived yet.
        on_done: called when the last block has arrived or failed, or is too late.
    """

    chain: Sequence[bytes]
    num_left: int = 0
    on_done: Callable[[], None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether each block has arrived, has failed or is too late."""
        return self.num_left == 0


@dataclass(slots=True)
class _Load:
    """A block that is being read into a host block, and the prefetches that wait for it."""

    host_id: int
    waiting: list[Prefetch]


class CacheTiers:
    """Host memory and disk below one pool; only the engine's thread uses it.

    Args:
        memory: the memory of the pool.
        host: the tier below the pool.
        disk: the tier below host memory, if any. Blocks of an earlier process in it are cached from the
            start.
        listener: is notified which blocks all tiers together hold.
    """

    def __init__(
        self,
        memory: KvMemory,
        host: HostCache,
        disk: DiskCache | None = None,
        listener: BlockListener | None = None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.counts = TierCounts()
        self._memory = memory
        self._listener = listener
        self._tree = PrefixTree()
        self._pooled: set[bytes] = set()
        """Hashes of the pool's blocks, including blocks that this step copies into the pool."""
        self._promoting: dict[int, bytes] = {}
        """Hashes of the blocks that this step copies into the pool, by host block."""
        self._loading: dict[bytes, _Load] = {}
        self._loaded: set[bytes] = set()
        """Hashes of blocks in host memory that were read from disk and have not been used since."""
        if disk is not None:
            self._take_over(disk)

    def _take_over(self, disk: DiskCache) -> None:
        """Adopt the blocks of an earlier process on disk, if all their parents are there too."""
        children: dict[bytes | None, list[bytes]] = {}
        for block_hash, parent_hash in disk.parents.items():
            children.setdefault(parent_hash, []).append(block_hash)
        reachable = children.get(None, [])[:]
        for each in reachable:
            self._publish(each, disk.parents[each])
            reachable += children.get(each, ())
        for each in disk.parents.keys() - set(reachable):
            disk.discard(each)
        disk.parents.clear()

    # --- called by the pool -------------------------------------------------------------------------------

    def on_block_sealed(self, block_hash: bytes, parent_hash: bytes | None) -> None:
        """Record a block that the pool contains from now on."""
        if block_hash not in self._tree and not self._publish(block_hash, parent_hash):
            return  # its parent was dropped, so no prompt can find it
        self._pooled.add(block_hash)
        self._loaded.discard(block_hash)
        self.host.discard(block_hash)

    def on_blocks_evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Move blocks that leave the pool, children before parents, to host memory."""
        for block_id, block_hash in blocks:
            if block_hash not in self._pooled:
                continue  # its parent was dropped, so no prompt can find it
            is_kept = block_hash in self.host or self._copy_to_host(block_id, block_hash)
            self._pooled.discard(block_hash)
            if not is_kept and not self._is_on_disk(block_hash):
                self._drop(block_hash)

    def on_block_stripped(self, block_id: int, block_hash: bytes) -> None:
        """Copy a block to host memory, and keep it there: host memory and disk have only whole blocks."""
        if block_hash in self._pooled and block_hash not in self.host and not self._is_on_disk(block_hash):
            self._copy_to_host(block_id, block_hash)

    def _copy_to_host(self, block_id: int, block_hash: bytes) -> bool:
        """Copy a block of the pool to host memory, unless it is bare; return whether there was room."""
        host_id = None if self._memory.is_bare(block_id) else self._host_block()
        if host_id is None:
            return False
        self.host.copy_in(self._memory, block_id, host_id)
        self.host.add_block(block_hash, host_id)
        self.counts.demotions["host"] += 1
        return True

    def on_blocks_forgotten(self, block_hashes: Sequence[bytes]) -> None:
        """Drop blocks that the pool has forgotten, and all their descendants."""
        for each in block_hashes:
            self._pooled.discard(each)
            if each in self._tree:
                self._drop(each)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._tree

    def is_shared(self, block_hash: bytes, child_hash: bytes | None) -> bool:
        """Return whether another block than ``child_hash`` follows a block in any tier."""
        return any(each != child_hash for each in self._tree.children(block_hash))

    def clear(self) -> int:
        """Drop the blocks below the pool; return how many blocks are no longer in any tier.

        Call this only between steps.
        """
        num_held = len(self._tree)
        for each in list(self.host):
            if each in self._pooled:
                self.host.discard(each)
            elif each in self._tree:
                self._drop(each)
        for each in list(self.disk or ()):
            assert self.disk is not None
            if self._is_above_disk(each):
                self.disk.discard(each)
            elif each in self._tree:
                self._drop(each)
        return num_held - len(self._tree)

    def _publish(self, block_hash: bytes, parent_hash: bytes | None) -> bool:
        is_new = self._tree.add_block(block_hash, parent_hash)
        if is_new and self._listener:
            self._listener.stored([block_hash], parent_hash)
        return is_new

    def _host_block(self) -> int | None:
        """Return an empty host block, after an eviction if needed; None if all are being copied or read."""
        while not self.host.num_free:
            oldest = self.host.pop_oldest()
            if oldest is None:
                return None
            self._evict_from_host(*oldest)
        return self.host.allocate(1)[0]

    def _evict_from_host(self, block_hash: bytes, host_id: int) -> None:
        """Move a block that has left host memory to disk, and free its host block."""
        self._loaded.discard(block_hash)
        if self._make_room_on_disk(block_hash):
            assert self.disk is not None
            payload = bytes(self.host.payload(host_id))
            self.disk.store(block_hash, self._tree.parent(block_hash), payload)
            self.counts.demotions["disk"] += 1
        self.host.free([host_id])
        if self._is_on_disk(block_hash):
            assert self.disk is not None
            self.disk.touch([block_hash])
        elif block_hash in self._tree and block_hash not in self._pooled:
            self._drop(block_hash)

    def _make_room_on_disk(self, block_hash: bytes) -> bool:
        """Return whether a block is to be written to disk.

        This may drop the disk's oldest block with its descendants, and the given block may be among these.
        """
        if self.disk is None or block_hash in self.disk or not self.disk.can_store:
            return False
        oldest = self.disk.pop_oldest_if_full()
        if oldest is not None and not self._is_above_disk(oldest):
            self._drop(oldest)
        return block_hash in self._tree

    def _is_on_disk(self, block_hash: bytes) -> bool:
        return self.disk is not None and block_hash in self.disk

    def _is_above_disk(self, block_hash: bytes) -> bool:
        return block_hash in self._pooled or block_hash in self.host

    def _drop(self, block_hash: bytes) -> None:
        """Drop a block that no tier has any longer, and all its descendants."""
        removed = self._tree.remove_subtree(block_hash)
        for each in removed:
            self._pooled.discard(each)
            self._loaded.discard(each)
            self.host.discard(each)
            if self.disk is not None:
                self.disk.discard(each)
        self.counts.demotions["gone"] += len(removed)
        if self._listener:
            self._listener.removed(removed)

    # --- moving blocks up ---------------------------------------------------------------------------------

    def num_on_host(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are in host memory."""
        return sum(1 for _ in takewhile(self.host.__contains__, block_hashes))

    def begin_promotion(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Take blocks out of host memory for this step's copies into the pool; return their host blocks."""
        for each in block_hashes:
            tier = "disk" if each in self._loaded else "host"
            self._loaded.discard(each)
            self.counts.hits[tier] += 1
        self._pooled.update(block_hashes)
        host_ids = [self.host.pop_for_promotion(each) for each in block_hashes]
        self._promoting.update(zip(host_ids, block_hashes, strict=True))
        return host_ids

    def undo_promotion(self, pool: BlockPool, host_ids: Sequence[int]) -> None:
        """Put a chain's blocks back into host memory, since the current step does not copy them after all."""
        self.host.keep_after_step(host_ids)
        for host_id in reversed(host_ids):
            block_hash = self._promoting.pop(host_id)
            # The pool may have a bare block with this hash.
            if block_hash not in pool:
                self._pooled.discard(block_hash)
            # This step's allocations may have dropped the block, or copied it from the pool to host memory.
            if block_hash in self._tree and block_hash not in self.host:
                self.host.add_block(block_hash, host_id)
            else:
                self.host.free([host_id])

    def promote(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as (host block, block), from host memory into the pool."""
        self.host.copy_out(self._memory, pairs)
        self.host.end_step()
        self._promoting.clear()
        self.counts.promotions["host"] += len(pairs)

    def promote_into(self, pool: BlockPool, block_hashes: Sequence[bytes]) -> None:
        """Copy a prompt's blocks from host memory into the pool, as far as there is room.

        Call this only between steps: this overwrites blocks of the pool, which a step may not have copied
        elsewhere yet.
        """
        held = pool.look_up(block_hashes)
        missing = block_hashes[len(held) :]
        pool.share(held)
        missing = missing[: min(self.num_on_host(missing), pool.num_allocatable)]
        host_ids = self.begin_promotion(missing)
        table = held + pool.allocate(len(missing))
        self.promote(list(zip(host_ids, table[len(held) :], strict=True)))
        for index in range(len(held), len(table)):
            parent_hash = block_hashes[index - 1] if index else None
            table[index] = pool.seal(table[index], block_hashes[index], parent_hash)
        pool.free(table)

    def prefetch(self, block_hashes: Sequence[bytes], on_done: Callable[[], None] | None = None) -> Prefetch:
        """Begin to read the blocks of a prompt that are only on disk.

        ``on_done`` is called when the last one has arrived or failed, but not if there is nothing to read.
        """
        chain = list(takewhile(self._tree.__contains__, block_hashes))
        prefetch = Prefetch(chain, on_done=on_done)
        self.host.touch(chain)
        if self.disk is not None:
            self.disk.touch(chain)
            for each in chain:
                if not self._is_above_disk(each) and not self._begin_load(each, prefetch):
                    break
        return prefetch

    def _begin_load(self, block_hash: bytes, prefetch: Prefetch) -> bool:
        """Begin to read a block, unless a prefetch already reads it; return whether to wait for it."""
        assert self.disk is not None
        if self.disk.is_stalled:
            return False
        load = self._loading.get(block_hash)
        if load is None:
            if len(self._loading) >= MAX_LOADING_SHARE * self.host.num_blocks:
                return False
            host_id = self._host_block()
            if host_id is None or block_hash not in self.disk:
                if host_id is not None:
                    self.host.free([host_id])
                return False
            load = self._loading[block_hash] = _Load(host_id, [])
            self.disk.read(block_hash, self.host.payload(host_id))
        load.waiting.append(prefetch)
        prefetch.num_left += 1
        return True

    def apply_disk_results(self) -> None:
        """Apply the disk's reads and writes that have ended since the last call."""
        if self.disk is None:
            return
        for finished in self.disk.drain_finished():
            if finished.failure == STALLED:
                self.counts.disk_errors[STALLED] += 1
                self._end_waits(self._loading[finished.block_hash])
                continue
            if finished.failure:
                self._drop_damaged(finished)
            if finished.is_read:
                self._end_load(finished)

    def _drop_damaged(self, finished: Finished) -> None:
        """Drop a block whose file cannot be trusted."""
        assert self.disk is not None
        self.counts.disk_errors[finished.failure] += 1
        self.disk.discard(finished.block_hash)
        if finished.block_hash in self._tree and not self._is_above_disk(finished.block_hash):
            self._drop(finished.block_hash)

    def _end_load(self, finished: Finished) -> None:
        block_hash = finished.block_hash
        load = self._loading.pop(block_hash)
        if finished.failure or block_hash not in self._tree or self._is_above_disk(block_hash):
            self.host.free([load.host_id])
        else:
            self.host.add_block(block_hash, load.host_id)
            self._loaded.add(block_hash)
            self.counts.promotions["disk"] += 1
        self._end_waits(load)

    def _end_waits(self, load: _Load) -> None:
        """Let nothing wait for a block any longer."""
        waiting, load.waiting = load.waiting, []
        for prefetch in waiting:
            prefetch.num_left -= 1
            if prefetch.is_done:
                self.host.touch(prefetch.chain)
                if prefetch.on_done is not None:
                    prefetch.on_done()

    # --- checks -------------------------------------------------------------------------------------------

    def check_conservation(self, pool: BlockPool) -> None:
        """Raise AssertionError unless the tiers and the pool agree. Call this only between steps."""
        above = {each for each in self._pooled if each in pool}
        assert above == self._pooled, "the pool lacks blocks that it is said to hold"
        held = {*self._pooled, *self.host, *(self.disk or ())}
        assert held == self._tree.hashes, "blocks are held that are not published, or the other way round"
        is_apart = self._memory.frame_tables is not None or not any(e in self.host for e in self._pooled)
        assert is_apart, "a block is in the pool and below it"
        num_used = len(self.host) + len(self._loading)
        assert self.host.num_free + num_used == self.host.num_blocks, "host blocks have leaked"


def forget_tail(
    pool: BlockPool, tiers: CacheTiers | None, block_hashes: Sequence[bytes], num_kept: int
) -> int:
    """Forget the last blocks of a chain in all tiers, up to one that is used or that another chain shares.

    Call this only between steps.

    Args:
        block_hashes: the chain, from a prompt's first block on.
        num_kept: number of its first blocks that stay.

    Returns:
        The number of blocks that were cached in any tier and no longer are.
    """
    tail: list[bytes] = []
    child = None
    for each in reversed(block_hashes[num_kept:]):
        if pool.is_shared(each, child) or (tiers is not None and tiers.is_shared(each, child)):
            break
        tail.append(each)
        child = each
    cached = pool if tiers is None else tiers
    num_cached = sum(each in cached for each in tail)
    pool.forget(tail)
    if tiers is not None:
        tiers.on_blocks_forgotten(tail)
    return num_cached
