"""A prefix index with a time limit, which never raises an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum

from quire.kvindex.circuit_breaker import CircuitBreaker
from quire.kvindex.index import UNREACHABLE, Holding, PrefixIndex

logger = logging.getLogger("quire.kvindex")

BUDGET_SECONDS = 0.02
"""Time limit for a look-up in Redis."""
NUM_AT_ONCE = 8
"""Most concurrent look-ups in Redis; others wait for their turn.

Each uses a connection. Redis runs one look-up at a time, so more connections do not make look-ups faster, and
opening a connection costs five times as much as a look-up.
"""
TURN_SECONDS = 0.2
"""Longest wait of a look-up for its turn. A thousand look-ups take less time if Redis answers promptly."""


class Fallback(StrEnum):
    """Why a look-up has no answer."""

    BUSY = "busy"
    TIMEOUT = "timeout"
    ERROR = "error"
    BREAKER_OPEN = "breaker_open"


class GuardedIndex:
    """Looks prefixes up in an index, or returns None if it does not answer in time.

    Args:
        index: the index that may fail or be late.
        breaker: stops look-ups for a while after too many failures in a row.
        on_fallback: called with the reason of each look-up that has no answer.
    """

    def __init__(
        self, index: PrefixIndex, breaker: CircuitBreaker, on_fallback: Callable[[Fallback], None]
    ) -> None:
        self._index = index
        self._breaker = breaker
        self._on_fallback = on_fallback
        self._turns = asyncio.Semaphore(NUM_AT_ONCE)

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding] | None:
        """Return the holders; None if the index is busy, fails or is late, or while the breaker is open."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            # Redis has not failed: only too many look-ups arrived at the same time.
            self._on_fallback(Fallback.BUSY)
            return None
        try:
            return await self._ask(block_hashes)
        finally:
            self._turns.release()

    async def _ask(self, block_hashes: Sequence[bytes]) -> list[Holding] | None:
        if not self._breaker.admits():
            self._on_fallback(Fallback.BREAKER_OPEN)
            return None
        try:
            async with asyncio.timeout(BUDGET_SECONDS):
                holdings = await self._index.look_up(block_hashes)
        except TimeoutError:
            self._fall_back(Fallback.TIMEOUT)
            return None
        except UNREACHABLE as error:
            self._fall_back(Fallback.ERROR, f"{type(error).__name__}: {error}")
            return None
        self._breaker.succeeded()
        return holdings

    def _fall_back(self, reason: Fallback, error: str = "") -> None:
        self._on_fallback(reason)
        if self._breaker.failed():
            logger.warning("index_given_up", extra={"fields": {"reason": reason, "error": error}})
