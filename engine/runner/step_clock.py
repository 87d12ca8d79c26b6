"""The time that each phase of a step takes."""

from __future__ import annotations

from collections.abc import Callable

PHASES = ("propose", "schedule", "prepare", "forward", "sample", "process")
"""The phases of a step in order; blocks are moved between ``schedule`` and ``prepare``."""


class StepClock:
    """Splits the time of a step into laps.

    Args:
        clock: returns seconds.

    Attributes:
        seconds: how long each phase of the last step took.
        lap_began_at: time when the current lap began, in seconds of the clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.lap_began_at = 0.0

    def start(self) -> None:
        """Begin a step and its first lap."""
        self.lap_began_at = self._clock()

    def lap(self, phase: str | None = None) -> float:
        """End the current lap, perhaps a phase, and begin the next; return the seconds of the old one."""
        before, self.lap_began_at = self.lap_began_at, self._clock()
        seconds = self.lap_began_at - before
        if phase is not None:
            self.seconds[phase] = seconds
        return seconds
