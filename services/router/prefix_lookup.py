"""Asks the index which workers hold the beginning of a prompt: a hint, in time or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from quire.kvindex.block_hash import block_hashes
from quire.kvindex.redis_index import Holding
from quire.services.log import get_logger
from quire.services.router.metrics import RouterMetrics

BUDGET_SECONDS = 0.02
"""What a look-up may cost a request."""
BREAKER_FAILURES = 5
BREAKER_SECONDS = 1.0

_log = get_logger("router")


class PrefixLookup(Protocol):
    """Knows how much of a prompt each worker holds."""

    async def cached_tokens(self, token_ids: Sequence[int]) -> Mapping[str, int]:
        """Return the tokens held, by worker id; empty where nothing is known. Never raises."""
        ...


class Index(Protocol):
    """The part of ``RedisIndex`` that a look-up needs."""

    async def look_up(self, block_hashes: Sequence[bytes]) -> Sequence[Holding]:
        """Return the holders of the first blocks."""
        ...


class NoIndex:
    """Knows nothing: workers are chosen by load and by the prompt's own order."""

    async def cached_tokens(self, token_ids: Sequence[int]) -> Mapping[str, int]:
        """Return nothing."""
        return {}


class IndexLookup:
    """Looks prompts up in the Redis index.

    After some failures in a row the index is left alone for a while, so that a Redis that hangs costs a few
    requests their budget, not all of them.
    """

    def __init__(
        self,
        index: Index,
        root_hash: bytes,
        block_size: int,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._root_hash = root_hash
        self._block_size = block_size
        self._metrics = metrics
        self._clock = clock
        self._num_failures = 0
        self._asleep_until = 0.0

    async def cached_tokens(self, token_ids: Sequence[int]) -> Mapping[str, int]:
        """Return the tokens held, by worker id; empty on any failure."""
        start = self._clock()
        if start < self._asleep_until or len(token_ids) < self._block_size:
            return {}
        hashes = block_hashes(self._root_hash, token_ids, self._block_size)
        try:
            async with asyncio.timeout(BUDGET_SECONDS):
                holdings = await self._index.look_up(hashes)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self._account_failure(error)
            return {}
        self._num_failures = 0
        self._metrics.index_seconds.observe(self._clock() - start)
        return {holding.worker.worker_id: holding.num_blocks * self._block_size for holding in holdings}

    def _account_failure(self, error: Exception) -> None:
        self._metrics.index_failures.inc()
        self._num_failures += 1
        if self._num_failures >= BREAKER_FAILURES:
            self._asleep_until = self._clock() + BREAKER_SECONDS
        if self._num_failures == BREAKER_FAILURES:
            _log.warning("prefix_index_lost", error=f"{type(error).__name__}: {error}")
