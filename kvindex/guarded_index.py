"""An index that costs a request little time and never an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum

from quire.kvindex.circuit_breaker import CircuitBreaker
from quire.kvindex.index import UNREACHABLE, Holding, PrefixIndex

logger = logging.getLogger("quire.kvindex")

BUDGET_SECONDS = 0.02
"""What a look-up may cost a request."""


class Fallback(StrEnum):
    """Why a look-up was not answered."""

    TIMEOUT = "timeout"
    ERROR = "error"
    BREAKER_OPEN = "breaker_open"


class GuardedIndex:
    """Answers in time, or says that it cannot.

    Args:
        index: the one that may fail or be late.
        breaker: leaves it alone for a while once it failed too often.
        on_fallback: is told why a look-up was answered without the index.
    """

    def __init__(
        self, index: PrefixIndex, breaker: CircuitBreaker, on_fallback: Callable[[Fallback], None]
    ) -> None:
        self._index = index
        self._breaker = breaker
        self._on_fallback = on_fallback

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding] | None:
        """Return the holders; None when the index fails, is late or has failed too often."""
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
