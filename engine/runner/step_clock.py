"""The time that each phase of a step takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StepSeconds:
    """Seconds that each phase of the last step took."""

    propose: float = 0.0
    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    process: float = 0.0


class StepClock:
    """Splits the time of a step into laps.

    Args:
        clock: returns seconds.

    Attributes:
        lap_began_at: time when the current lap began, in seconds of the clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.lap_began_at = 0.0

    def start(self) -> None:
        """Begin a step and its first lap."""
        self.lap_began_at = self._clock()

    def lap(self) -> float:
        """End the current lap and begin the next; return the seconds of the one that ended."""
        before, self.lap_began_at = self.lap_began_at, self._clock()
        return self.lap_began_at - before
