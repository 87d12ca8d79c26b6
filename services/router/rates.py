"""How fast workers are, by what their work took."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

NEWEST_SHARE = 0.2
"""Of a measurement, in the sums that a rate is made of."""
HALF_LIFE_SECONDS = 30.0
"""After so long without news a worker's measurements weigh half, and what is usual of the others the rest."""
PRIOR_WEIGHT = 0.2
"""Of what is usual, in measurements."""


@dataclass(slots=True)
class _Measured:
    """Discounted sums; their ratio is dominated by the large pieces of work, as it should be."""

    amount: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    updated_at: float = 0.0

    def add(self, amount: float, seconds: float, now: float) -> None:
        kept = (1 - NEWEST_SHARE) * self.freshness(now)
        self.amount = kept * self.amount + amount
        self.seconds = kept * self.seconds + seconds
        self.weight = kept * self.weight + 1
        self.updated_at = now

    def freshness(self, now: float) -> float:
        return math.exp2((self.updated_at - now) / HALF_LIFE_SECONDS)


class Rates:
    """Units a second by name, learned from pieces of work and what they took.

    What was measured is forgotten with time, in favour of what is usual of the others: one that was slow once
    is tried again, and so its rate stays known. That is all the exploring there is, and no die is cast.

    Args:
        initial: what is usual before anything was measured.
    """

    def __init__(self, initial: float, clock: Callable[[], float]) -> None:
        self._initial = initial
        self._clock = clock
        self._measured: dict[str, _Measured] = {}
        self._all = _Measured()

    def get(self, name: str) -> float:
        """Return a rate."""
        usual = self._all.amount / self._all.seconds if self._all.seconds else self._initial
        own = self._measured.get(name)
        if own is None or not own.seconds:
            return usual
        weight = own.weight * own.freshness(self._clock())
        return (weight + PRIOR_WEIGHT) / (weight * own.seconds / own.amount + PRIOR_WEIGHT / usual)

    def add(self, name: str, amount: float, seconds: float, *, is_usual: bool = True) -> None:
        """Note a piece of work and what it took; what is not usual says nothing about the others."""
        now = self._clock()
        self._measured.setdefault(name, _Measured(updated_at=now)).add(amount, seconds, now)
        if is_usual:
            self._all.add(amount, seconds, now)

    def forget(self, name: str) -> None:
        """Drop what is known of one that has left."""
        self._measured.pop(name, None)
