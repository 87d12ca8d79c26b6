"""The contract of a prefix index, which gives hints about which workers have cached which prefixes.

A worker publishes blocks under a lease, parents before children, and evicts children before parents. The
published blocks are thus closed under prefixes, so one number describes how much of a prompt a worker has
cached. An entry is valid during the lease under which it was published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from redis.exceptions import RedisClusterException, RedisError

from quire.kvindex.worker_record import WorkerRecord

UNREACHABLE = (RedisError, RedisClusterException, OSError)
"""Exceptions if an index does not answer. The one of a Redis cluster is not a ``RedisError``."""


class LeaseLostError(Exception):
    """The lease expired, or the index lost it. The worker must join again and publish everything."""


class IndexFullError(Exception):
    """The index has no memory left. Publish again after an eviction, or give Redis more memory."""


class Holding(NamedTuple):
    """A worker, and the number of leading blocks of a prompt that it has published."""

    worker: WorkerRecord
    num_blocks: int


class PrefixIndex(Protocol):
    """The reading side of an index, which the router uses."""

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Return each live worker that has the first block, with its number of leading blocks.

        ::

            prompt      a   b   c   d
            worker 1    a   b       d       Holding(worker 1, 2): d is unreachable without c
            worker 2    a   b   c           Holding(worker 2, 3)
            worker 3        b   c           none: it lacks the first block
        """


class IndexLease(Protocol):
    """The writing side of an index: one worker's lease and entries. Calls must not overlap."""

    async def join(self, record: WorkerRecord) -> None:
        """Begin a lease with a new epoch, which invalidates everything that was published before."""

    async def beat(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: there is no lease to renew.
        """

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Add blocks, parents before children.

        Raises:
            LeaseLostError: the lease is gone.
            IndexFullError: the index is full; some of the first blocks may have been added.
        """

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks of this lease only, children before parents; also works after the lease has ended."""

    async def sweep(self) -> int:
        """Visit some entries of all workers and remove the invalid ones; return how many were removed."""

    async def leave(self) -> None:
        """End the lease and thus invalidate its entries, unless another process has taken over the lease."""
