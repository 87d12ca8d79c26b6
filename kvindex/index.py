"""The contract of a prefix index: who holds which prefix, as a hint.

A worker publishes blocks under a lease, parents before children, and evicts children before parents. What it
has published is thus closed under prefixes, and one number says how much of a prompt it holds. Entries count
while the lease lives under which they were published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from redis.exceptions import RedisClusterException, RedisError

from quire.kvindex.membership import WorkerRecord

UNREACHABLE = (RedisError, RedisClusterException, OSError)
"""What an index raises that does not answer; a cluster's exception is no ``RedisError``."""


class LeaseLostError(Exception):
    """The lease expired, or the index lost it: join again and publish everything."""


class IndexFullError(Exception):
    """The index has no memory left: publish again once something was evicted, or give Redis more."""


class Holding(NamedTuple):
    """How many leading blocks of a prompt a worker has published."""

    worker: WorkerRecord
    num_blocks: int


class PrefixIndex(Protocol):
    """The router's side."""

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Return each live worker that holds the first block, and how far its blocks go."""
        ...


class IndexLease(Protocol):
    """The worker's side: its life in the index. Calls must not overlap."""

    async def join(self, record: WorkerRecord) -> None:
        """Begin a lease with a new epoch; nothing that was published before counts any more."""
        ...

    async def beat(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: there is none to renew.
        """
        ...

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Add blocks, parents before children.

        Raises:
            LeaseLostError: the lease is gone.
            IndexFullError: there is no room; some of the first may have been added.
        """
        ...

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks, children before parents; works without a lease, on this lease's entries alone."""
        ...

    async def sweep(self) -> int:
        """Visit some entries, remove those that count no more, whosever they are; return how many."""
        ...

    async def leave(self) -> None:
        """End the lease, unless it is already another's: its entries stop to count at once."""
        ...
