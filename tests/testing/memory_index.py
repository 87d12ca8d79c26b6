"""A prefix index within one process: the simplest implementation of the contract, without a server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quire.kvindex.index import Holding, LeaseLostError
from quire.kvindex.worker_record import WorkerRecord


@dataclass(frozen=True, slots=True)
class _Lease:
    record: WorkerRecord
    epoch: int
    expires_at: float


@dataclass(slots=True)
class MemoryStore:
    """The state that the readers and leases of one index share."""

    clock: Callable[[], float] = time.monotonic
    leases: dict[str, _Lease] = field(default_factory=dict)
    holders: dict[bytes, dict[str, int]] = field(default_factory=dict)
    epochs: itertools.count[int] = field(default_factory=itertools.count)

    def live(self, worker_id: str) -> _Lease | None:
        """Return a worker's lease, unless it has expired."""
        lease = self.leases.get(worker_id)
        return lease if lease is not None and self.clock() < lease.expires_at else None

    def remove(self, block_hash: bytes, worker_id: str) -> None:
        """Remove a worker's entry for a block; remove the block if this was its last entry."""
        holders = self.holders[block_hash]
        del holders[worker_id]
        if not holders:
            del self.holders[block_hash]

    def clear(self) -> None:
        """Remove all leases and entries."""
        self.leases.clear()
        self.holders.clear()


class MemoryIndex:
    """Looks prefixes up in a ``MemoryStore``."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Return each live worker that has the first block, with its number of leading blocks."""
        holdings = []
        for worker_id in self._store.holders.get(block_hashes[0], ()) if block_hashes else ():
            lease = self._store.live(worker_id)
            if lease is not None and (depth := self._depth(worker_id, lease.epoch, block_hashes)):
                holdings.append(Holding(lease.record, depth))
        return holdings

    def _depth(self, worker_id: str, epoch: int, block_hashes: Sequence[bytes]) -> int:
        holders = self._store.holders
        is_held = (holders.get(each, {}).get(worker_id) == epoch for each in block_hashes)
        return sum(1 for _ in itertools.takewhile(bool, is_held))

    async def members(self) -> list[WorkerRecord]:
        """Return the records of all live leases."""
        leases = map(self._store.live, self._store.leases)
        return [lease.record for lease in leases if lease is not None]


class MemoryLease:
    """One worker's lease in a ``MemoryStore``."""

    def __init__(self, store: MemoryStore, ttl_seconds: float) -> None:
        self._store = store
        self._ttl_seconds = ttl_seconds
        self._worker_id = ""
        self._epoch = -1

    async def join(self, record: WorkerRecord) -> None:
        """Begin a lease with a new epoch."""
        self._worker_id, self._epoch = record.worker_id, next(self._store.epochs)
        expires_at = self._store.clock() + self._ttl_seconds
        self._store.leases[record.worker_id] = _Lease(record, self._epoch, expires_at)

    async def beat(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: there is no lease to renew.
        """
        lease = replace(self._own(), expires_at=self._store.clock() + self._ttl_seconds)
        self._store.leases[self._worker_id] = lease

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Add blocks, parents before children.

        Raises:
            LeaseLostError: the lease is gone.
        """
        self._own()
        for each in block_hashes:
            self._store.holders.setdefault(each, {})[self._worker_id] = self._epoch

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks of this lease, children before parents."""
        for each in block_hashes:
            if self._store.holders.get(each, {}).get(self._worker_id) == self._epoch:
                self._store.remove(each, self._worker_id)

    async def sweep(self) -> int:
        """Remove all invalid entries of all workers; return how many were removed."""
        stale = [
            (block_hash, worker_id)
            for block_hash, holders in self._store.holders.items()
            for worker_id, epoch in holders.items()
            if not (lease := self._store.live(worker_id)) or lease.epoch != epoch
        ]
        for block_hash, worker_id in stale:
            self._store.remove(block_hash, worker_id)
        return len(stale)

    async def leave(self) -> None:
        """End the lease, unless another process has taken it over."""
        lease = self._store.leases.get(self._worker_id)
        if lease is not None and lease.epoch == self._epoch:
            del self._store.leases[self._worker_id]

    def _own(self) -> _Lease:
        lease = self._store.live(self._worker_id)
        if lease is None or lease.epoch != self._epoch:
            raise LeaseLostError
        return lease
