"""Leaves alone what keeps failing."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum


class BreakerState(IntEnum):
    """What a breaker does with the next attempt."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """Refuses attempts for a while after some failures in a row, then lets one through to see.

    Args:
        max_failures: failures in a row that open it.
        open_seconds: how long it stays open.
        clock: seconds, never going back.
    """

    def __init__(
        self, max_failures: int = 5, open_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures = max_failures
        self._open_seconds = open_seconds
        self._clock = clock
        self._num_failures = 0
        self._open_until = 0.0

    @property
    def state(self) -> BreakerState:
        """What the next attempt meets."""
        if self._num_failures < self._max_failures:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    def admits(self) -> bool:
        """Take an attempt, or refuse it."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            # The next trial is due in as long, whether or not this one reports: it may be cancelled.
            self._open_until = self._clock() + self._open_seconds
        return state is not BreakerState.OPEN

    def succeeded(self) -> None:
        """Report an admitted attempt that went well."""
        self._num_failures = 0

    def failed(self) -> bool:
        """Report an admitted attempt that did not; return whether this one opened the breaker."""
        self._num_failures += 1
        self._open_until = self._clock() + self._open_seconds
        return self._num_failures == self._max_failures
