"""Metrics of a prefix index, as decorators around its reading and its writing side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.kvindex.circuit_breaker import CircuitBreaker
from quire.kvindex.guarded_index import Fallback
from quire.kvindex.index import Holding, IndexFullError, IndexLease, LeaseLostError, PrefixIndex
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.worker_record import WorkerRecord

SECONDS_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05)
BLOCKS_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
RATIO_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class IndexMetrics:
    """Metrics of a router's look-ups."""

    def __init__(self, registry: CollectorRegistry, breaker: CircuitBreaker) -> None:
        histogram = partial(Histogram, registry=registry)
        self.lookup_seconds = histogram(
            "quire_index_lookup_seconds",
            "Time of a look-up; failed includes look-ups that were given up.",
            ["result"],
            buckets=SECONDS_BUCKETS,
        )
        for result in ("hit", "miss", "failed"):
            self.lookup_seconds.labels(result)
        self.lookup_blocks = histogram(
            "quire_index_lookup_blocks", "Blocks of a look-up.", buckets=BLOCKS_BUCKETS
        )
        self.match_ratio = histogram(
            "quire_index_match_ratio",
            "Share of a prompt's blocks that the worker with most of them has.",
            buckets=RATIO_BUCKETS,
        )
        self._fallbacks = Counter(
            "quire_index_fallback_total",
            "Requests that were routed without the index.",
            ["reason"],
            registry=registry,
        )
        for reason in Fallback:
            self._fallbacks.labels(reason)
        state = Gauge("quire_index_breaker_state", "0 closed, 1 half open, 2 open.", registry=registry)
        state.set_function(lambda: breaker.state)

    def fallback(self, reason: Fallback) -> None:
        """Count a request that was routed without the index."""
        self._fallbacks.labels(reason).inc()


class InstrumentedIndex:
    """An index whose look-ups are measured."""

    def __init__(
        self, index: PrefixIndex, metrics: IndexMetrics, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._clock = clock

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Pass the look-up on, and measure its time and how much of the prompt was found."""
        start, result = self._clock(), "failed"
        self._metrics.lookup_blocks.observe(len(block_hashes))
        try:
            holdings = await self._index.look_up(block_hashes)
            result = "hit" if holdings else "miss"
        finally:
            self._metrics.lookup_seconds.labels(result).observe(self._clock() - start)
        if block_hashes:
            deepest = max((holding.num_blocks for holding in holdings), default=0)
            self._metrics.match_ratio.observe(deepest / len(block_hashes))
        return holdings


class PublisherMetrics:
    """Metrics of a worker's publishing."""

    def __init__(self, registry: CollectorRegistry, ledger: PublishLedger) -> None:
        self.entries = Counter(
            "quire_index_publish_entries_total",
            "Entries published, evicted, or removed by a sweep.",
            ["op"],
            registry=registry,
        )
        for op in ("publish", "evict", "sweep"):
            self.entries.labels(op)
        self.fenced = Counter(
            "quire_index_fenced_total",
            "Lost leases; a steady rate means that two workers have the same name.",
            registry=registry,
        )
        self.full = Counter(
            "quire_index_full_total",
            "Publishes that Redis refused because its memory was full.",
            registry=registry,
        )
        joined = Gauge(
            "quire_index_joined",
            "1 while the worker has a lease and publishes its blocks.",
            registry=registry,
        )
        joined.set_function(lambda: ledger.is_following)
        pending = Gauge("quire_index_publish_queue", "Changes not in the index yet.", registry=registry)
        pending.set_function(lambda: ledger.num_pending)
        lag = Gauge(
            "quire_index_publish_lag_seconds",
            "Age of the oldest change that is not in the index yet.",
            registry=registry,
        )
        lag.set_function(lambda: ledger.lag_seconds)


class InstrumentedLease:
    """A lease whose entries are counted."""

    def __init__(self, lease: IndexLease, metrics: PublisherMetrics) -> None:
        self._lease = lease
        self._metrics = metrics

    async def join(self, record: WorkerRecord) -> None:
        """Pass the call on."""
        await self._lease.join(record)

    async def beat(self) -> None:
        """Pass the call on; count a lost lease."""
        with self._metrics.fenced.count_exceptions(LeaseLostError):
            await self._lease.beat()

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Pass the call on; count the blocks, or the lost lease or full index that prevented it."""
        metrics = self._metrics
        with metrics.fenced.count_exceptions(LeaseLostError), metrics.full.count_exceptions(IndexFullError):
            await self._lease.publish(block_hashes)
        metrics.entries.labels("publish").inc(len(block_hashes))

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Pass the call on; count the blocks."""
        await self._lease.evict(block_hashes)
        self._metrics.entries.labels("evict").inc(len(block_hashes))

    async def sweep(self) -> int:
        """Pass the call on; count the removed entries."""
        num_removed = await self._lease.sweep()
        self._metrics.entries.labels("sweep").inc(num_removed)
        return num_removed

    async def leave(self) -> None:
        """Pass the call on."""
        await self._lease.leave()
