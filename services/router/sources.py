"""Opens the router's sources about workers and blocks: Redis, or a fixed list of workers without an index."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from quire.kvindex.block_hash import CacheScope, fingerprint, root_hash
from quire.kvindex.circuit_breaker import CircuitBreaker
from quire.kvindex.guarded_index import GuardedIndex
from quire.kvindex.index import UNREACHABLE
from quire.kvindex.instrumented_index import IndexMetrics, InstrumentedIndex
from quire.kvindex.redis_index import RedisIndex, membership_client, reader_client
from quire.services.router.execution.prefix_lookup import PrefixLookup
from quire.services.router.tenants.shared_usage import SharedUsage, shared_usage
from quire.services.router.workers.membership import Member, Membership, MembershipLost, StaticMembership


class Sources(NamedTuple):
    """Sources of the router's knowledge about the workers and their blocks."""

    membership: Membership
    prefixes: Callable[[int], PrefixLookup]
    """Returns the prefix look-up for a block size; called once the model is known."""
    expected_fingerprint: Callable[[bytes], str]
    """Returns the fingerprint that a worker with the router's secret has for a cache descriptor."""
    usage: SharedUsage | None = None
    """What tenants use of their limits on all routers; None without Redis."""


class RedisMembership:
    """The membership in Redis: workers that hold a lease there."""

    def __init__(self, index: RedisIndex) -> None:
        self._index = index

    async def members(self) -> Sequence[Member]:
        """Return the workers that hold a lease.

        Raises:
            MembershipLost: Redis does not answer.
        """
        try:
            records = await self._index.members()
        except UNREACHABLE as error:
            raise MembershipLost(f"{type(error).__name__}: {error}") from error
        return [Member(r.address, r.epoch, r.is_draining, r.fingerprint, r.role) for r in records]


@asynccontextmanager
async def open_sources(
    redis_url: str | None,
    worker_addresses: Sequence[str],
    cluster_secret: bytes,
    registry: CollectorRegistry,
) -> AsyncIterator[Sources]:
    """Open the sources until the context ends; a Redis that does not answer is not an error.

    Args:
        redis_url: None: use ``worker_addresses`` and no index.
    """

    def expected_fingerprint(descriptor: bytes) -> str:
        return fingerprint(descriptor, cluster_secret)

    def root_of(descriptor: bytes, scope: CacheScope) -> bytes:
        return root_hash(descriptor, cluster_secret, scope)

    def lookup(index: GuardedIndex | None, block_size: int) -> PrefixLookup:
        return PrefixLookup(index, root_of, block_size)

    if redis_url is None:
        yield Sources(StaticMembership(worker_addresses), partial(lookup, None), expected_fingerprint)
        return
    client, membership_reader = reader_client(redis_url), membership_client(redis_url)
    index = RedisIndex(client)
    breaker = CircuitBreaker()
    metrics = IndexMetrics(registry, breaker)
    guarded = GuardedIndex(InstrumentedIndex(index, metrics), breaker, metrics.fallback)
    prefixes = partial(lookup, guarded)
    membership = RedisMembership(RedisIndex(membership_reader))
    try:
        async with shared_usage(client) as usage:
            yield Sources(membership, prefixes, expected_fingerprint, usage)
    finally:
        await client.aclose()
        await membership_reader.aclose()
