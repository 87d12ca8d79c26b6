"""A circuit breaker: stops calls to something that keeps failing."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum


class BreakerState(IntEnum):
    """The state of a breaker: it allows all attempts, allows one trial, or refuses all."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """Refuses attempts for a while after several failures in a row, and then allows one as a trial.

    Args:
        max_failures: number of failures in a row that open the breaker.
        open_seconds: how long the breaker stays open.
        clock: returns monotonic seconds.
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
        """The state that applies to the next attempt."""
        if self._num_failures < self._max_failures:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    def admits(self) -> bool:
        """Return whether the next attempt may be made."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            # The next trial is allowed after the same time even if this one is cancelled and never reports a
            # result.
            self._open_until = self._clock() + self._open_seconds
        return state is not BreakerState.OPEN

    def succeeded(self) -> None:
        """Record that an admitted attempt succeeded."""
        self._num_failures = 0

    def failed(self) -> bool:
        """Record that an admitted attempt failed; return whether this failure opened the breaker."""
        self._num_failures += 1
        self._open_until = self._clock() + self._open_seconds
        return self._num_failures == self._max_failures
