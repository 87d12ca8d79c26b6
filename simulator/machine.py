"""The processors that simulated workers share."""

from __future__ import annotations

from typing import Protocol


class Sharer(Protocol):
    """Something whose work takes longer while others use the same processors."""

    def advance(self) -> None:
        """Account for the work since the last call, at the pace of this time."""

    def expect(self) -> None:
        """Schedule the end of the present work anew, at the present pace."""


class Machine:
    """Processors of which each busy worker wants a share; if they want more than all, all are slowed alike.

    Linux gives each runnable thread the same time, and all workers have the same number of threads.
    """

    def __init__(self) -> None:
        self._wanted: dict[Sharer, float] = {}
        self.slowdown = 1.0
        """How many times as long work takes as it would alone."""

    def want(self, sharer: Sharer, share: float) -> None:
        """Set the share of the processors that a worker would use now if it were alone; 0 if it is idle."""
        if self._wanted.get(sharer, 0.0) == share:
            return
        others = [each for each in self._wanted if each is not sharer]
        for each in (sharer, *others):
            each.advance()
        self._wanted.pop(sharer, None)
        if share:
            self._wanted[sharer] = share
        self.slowdown = max(1.0, sum(self._wanted.values()))
        for each in others:
            each.expect()
