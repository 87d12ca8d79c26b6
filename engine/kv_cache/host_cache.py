"""The cache tier below the pool: blocks in host memory. The least recently used block is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.swap_space import SwapSpace


class HostCache(SwapSpace):
    """Blocks in host memory, by hash.

    The caller owns a host block from its allocation until it is added here.

    With a GPU the memory is pinned, and copies are queued on a stream of the device in order with the steps.
    The host does not wait for them. Only ``payload``, which gives the CPU access to a block's bytes, waits
    for the block's last copy.
    """

    def __init__(self, memory: KvMemory) -> None:
        super().__init__(memory.num_blocks)
        self.memory = memory
        self._host_ids: OrderedDict[bytes, int] = OrderedDict()
        self._copied: dict[int, torch.cuda.Event] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._host_ids

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._host_ids)

    def __len__(self) -> int:
        return len(self._host_ids)

    def add_block(self, block_hash: bytes, host_id: int) -> None:
        """Record that a host block contains a block."""
        self._host_ids[block_hash] = host_id

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Mark a prompt's blocks as the most recently used, in an order that evicts children first."""
        for each in reversed(block_hashes):
            if each in self._host_ids:
                self._host_ids.move_to_end(each)

    def pop_oldest(self) -> tuple[bytes, int] | None:
        """Forget the least recently used block; return its hash and host block, which the caller owns now."""
        return self._host_ids.popitem(last=False) if self._host_ids else None

    def discard(self, block_hash: bytes) -> None:
        """Forget a block and free its host block, if it is in this cache."""
        host_id = self._host_ids.pop(block_hash, None)
        if host_id is not None:
            self.free([host_id])

    def pop_for_promotion(self, block_hash: bytes) -> int:
        """Forget a block that the current step copies into the pool; return its host block.

        The host block is free after the step.
        """
        host_id = self._host_ids.pop(block_hash)
        self.free_after_step([host_id])
        return host_id

    # --- bytes --------------------------------------------------------------------------------------------

    def copy_in(self, source: KvMemory, block_id: int, host_id: int) -> None:
        """Copy a block of the pool into a host block."""
        source.copy_out(self.memory, source.copies_to(self.memory, [(block_id, host_id)]))
        self._record_copy(source, host_id)

    def copy_out(self, target: KvMemory, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as (host block, block), into the pool."""
        target.copy_in(self.memory, self.memory.copies_to(target, pairs))
        for host_id, _ in pairs:
            self._record_copy(target, host_id)

    def payload(self, host_id: int) -> memoryview:
        """Wait until the CPU may read and write a host block; return its bytes, not a copy."""
        if (copied := self._copied.pop(host_id, None)) is not None:
            copied.synchronize()
        return self.memory.payload(host_id)

    def _record_copy(self, pool_memory: KvMemory, host_id: int) -> None:
        if (event := pool_memory.copies_event()) is not None:
            self._copied[host_id] = event
