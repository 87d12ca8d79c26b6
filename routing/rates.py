"""Estimates the speed of each worker from the measured times of its work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

NEWEST_SHARE = 0.2
"""Weight of the newest measurement; the sums of a rate keep ``1 - NEWEST_SHARE`` of their old value."""
HALF_LIFE_SECONDS = 30.0
"""Time after which a worker's measurements have half their weight, so that the fleet average counts more."""
PRIOR_WEIGHT = 0.2
"""Weight of the fleet average, in measurements."""


@dataclass(slots=True)
class _Measured:
    """Discounted sums of amounts and seconds; large pieces of work rightly dominate their ratio."""

    amount: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    updated_at: float = 0.0

    def add(self, amount: float, seconds: float, now: float) -> None:
        remaining = (1 - NEWEST_SHARE) * self.freshness(now)
        self.amount = remaining * self.amount + amount
        self.seconds = remaining * self.seconds + seconds
        self.weight = remaining * self.weight + 1
        self.updated_at = now

    def freshness(self, now: float) -> float:
        return math.exp2((self.updated_at - now) / HALF_LIFE_SECONDS)


class Rates:
    """Rates in units per second by name, learned from pieces of work and their measured times.

    Old measurements lose weight in favour of the fleet average, so a worker that was slow once is tried again
    and its rate stays current. There is no other exploration: nothing is random.

    Args:
        initial: the fleet average until something has been measured.
    """

    def __init__(self, initial: float, clock: Callable[[], float]) -> None:
        self._initial = initial
        self._clock = clock
        self._measured: dict[str, _Measured] = {}
        self._all = _Measured()

    def get(self, name: str) -> float:
        """Return a name's rate in units per second; a name without measurements has the fleet average."""
        average = self._all.amount / self._all.seconds if self._all.seconds else self._initial
        own = self._measured.get(name)
        if own is None or not own.seconds:
            return average
        weight = own.weight * own.freshness(self._clock())
        return (weight + PRIOR_WEIGHT) / (weight * own.seconds / own.amount + PRIOR_WEIGHT / average)

    def add(self, name: str, amount: float, seconds: float, *, is_usual: bool = True) -> None:
        """Record a piece of work and its duration in seconds.

        Args:
            is_usual: whether the work also counts in the fleet average.
        """
        now = self._clock()
        self._measured.setdefault(name, _Measured(updated_at=now)).add(amount, seconds, now)
        if is_usual:
            self._all.add(amount, seconds, now)

    def forget(self, name: str) -> None:
        """Drop the measurements of a worker that has left."""
        self._measured.pop(name, None)
