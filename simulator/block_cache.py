"""The cached blocks of a simulated worker, and their publication to the index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from quire.kvindex.memory_index import MemoryLease, MemoryStore
from quire.kvindex.worker_record import WorkerRecord

Result = TypeVar("Result")


def now(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never waits, such as those of the in-memory index, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("the coroutine waits for something")


class BlockCache:
    """Blocks in the order of their last use; children are evicted before parents, as in a worker's pool."""

    def __init__(self, worker_id: str, role: str, num_blocks: int, store: MemoryStore) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._lease = MemoryLease(store, ttl_seconds=float("inf"))
        now(self._lease.join(WorkerRecord(worker_id, role, worker_id, worker_id, "")))

    def num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are in this cache."""
        for index, each in enumerate(block_hashes):
            if each not in self._blocks:
                return index
        return len(block_hashes)

    def store(self, block_hashes: Sequence[bytes], num_kept: int = 0) -> list[bytes]:
        """Cache blocks, and evict others until these and ``num_kept`` more fit; return those to publish."""
        new = [each for each in block_hashes if each not in self._blocks]
        for each in reversed(block_hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        num_evicted = max(0, len(self._blocks) + num_kept - self._num_blocks)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(min(num_evicted, len(self._blocks)))]
        now(self._lease.evict(evicted))
        return new

    def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Publish those of the blocks that have not been evicted."""
        now(self._lease.publish([each for each in block_hashes if each in self._blocks]))
