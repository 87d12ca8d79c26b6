"""The blocks that a simulated worker keeps, and what it tells the index of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from quire.kvindex.membership import WorkerRecord
from quire.kvindex.memory_index import MemoryLease, MemoryStore

Result = TypeVar("Result")


def now(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never waits, as those of the index in memory."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("the coroutine waits for something")


class BlockCache:
    """Blocks in the order of their last use; children go before their parents, as in a worker's pool."""

    def __init__(self, worker_id: str, role: str, num_blocks: int, store: MemoryStore) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._lease = MemoryLease(store, ttl_seconds=float("inf"))
        now(self._lease.join(WorkerRecord(worker_id, role, worker_id, worker_id, "")))

    def num_held(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are here."""
        for index, each in enumerate(block_hashes):
            if each not in self._blocks:
                return index
        return len(block_hashes)

    def store(self, block_hashes: Sequence[bytes], num_kept: int = 0) -> list[bytes]:
        """Keep blocks, evict what has no room beside ``num_kept`` others; return those to be published."""
        new = [each for each in block_hashes if each not in self._blocks]
        for each in reversed(block_hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        num_evicted = max(0, len(self._blocks) + num_kept - self._num_blocks)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(min(num_evicted, len(self._blocks)))]
        now(self._lease.evict(evicted))
        return new

    def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Tell the index of blocks, unless they are gone already."""
        now(self._lease.publish([each for each in block_hashes if each in self._blocks]))
