"""Leases on blocks that this worker holds, so that other workers can copy them.

A pinned block is neither evicted nor written. A lease expires if it is not renewed, so the blocks of a puller
that vanished are not pinned for long.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import UnknownLeaseError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.metrics import TransferMetrics

LEASE_SECONDS = 5.0
SWEEP_SECONDS = 0.25


class BlockSource(Protocol):
    """The source of the blocks that other workers pull: this worker's pool."""

    layout: KvLayout
    epoch: str

    async def pin(self, lease_id: str, block_hashes: Sequence[bytes]) -> Sequence[int]:
        """Pin the leading blocks that are present, and return their ids.

        Raises:
            TransferError: the worker is about to stop.
        """

    def unpin(self, lease_id: str) -> None:
        """Unpin the blocks of a lease, after any ``pin`` that still runs; ignore an unknown lease."""

    def frame(self, index: int, block_hash: bytes, block_id: int, *, is_bare: bool = False) -> Frame:
        """Return the frame of a pinned block; called in a thread."""


@dataclass(eq=False, slots=True)
class Lease:
    """A set of pinned blocks, and the time at which the pins expire."""

    lease_id: str
    block_hashes: Sequence[bytes]
    block_ids: Sequence[int]
    expires_at: float
    is_closed: bool = False


class BlockLeases:
    """Grants, renews and ends all leases on a worker's blocks.

    Args:
        max_blocks: most blocks under lease at a time; a new lease gets at most the remaining number.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        source: BlockSource,
        metrics: TransferMetrics,
        *,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self._metrics = metrics
        self._num_left = max_blocks
        self._clock = clock
        self._leases: dict[str, Lease] = {}

    async def pin(self, block_hashes: Sequence[bytes]) -> Lease | None:
        """Lease the leading blocks that are present; None if there are none, or ``max_blocks`` are leased."""
        wanted = block_hashes[: self._num_left]
        if not wanted:
            return None
        self._num_left -= len(wanted)
        lease_id = secrets.token_hex(16)
        try:
            block_ids = await self.source.pin(lease_id, wanted)
        except BaseException:
            self._num_left += len(wanted)
            self.source.unpin(lease_id)
            raise
        self._num_left += len(wanted) - len(block_ids)
        if not block_ids:
            return None
        lease = Lease(lease_id, wanted[: len(block_ids)], block_ids, self._clock() + LEASE_SECONDS)
        self._leases[lease_id] = lease
        self._metrics.set_leases(len(self._leases))
        return lease

    def find(self, lease_id: str) -> Lease:
        """Return a lease that has not ended.

        Raises:
            UnknownLeaseError: the lease has ended or never existed.
        """
        self.sweep()
        if (lease := self._leases.get(lease_id)) is None:
            raise UnknownLeaseError("the lease has ended or is another process's: pin the blocks again")
        return lease

    def renew(self, lease_id: str) -> None:
        """Extend a lease to its full time from now.

        Raises:
            UnknownLeaseError: the lease has ended or never existed.
        """
        self.find(lease_id).expires_at = self._clock() + LEASE_SECONDS

    def release(self, lease_id: str) -> None:
        """End a lease; do nothing if it is unknown or has ended."""
        if (lease := self._leases.pop(lease_id, None)) is not None:
            lease.is_closed = True
            self._num_left += len(lease.block_ids)
            self.source.unpin(lease_id)
            self._metrics.set_leases(len(self._leases))

    def sweep(self) -> None:
        """End the leases that have expired."""
        now = self._clock()
        for lease in [lease for lease in self._leases.values() if lease.expires_at <= now]:
            self.release(lease.lease_id)
            self._metrics.record_expired()

    async def sweep_forever(self) -> None:
        """End expired leases every ``SWEEP_SECONDS``, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()
