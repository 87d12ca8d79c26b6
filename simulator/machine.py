"""The processors that simulated workers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Timeline(Protocol):
    """The simulated time, and the schedule of events."""

    now: float

    def at(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action for a simulated time in seconds."""


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


class Errand:
    """Work for one request outside the engines: of the router, or of a worker that sends or receives blocks.

    Args:
        seconds: its time on a machine without other work.
        share: the share of the processors that it uses meanwhile.
        then: called when it is done.
    """

    def __init__(
        self, timeline: Timeline, machine: Machine, seconds: float, share: float, then: Callable[[], None]
    ) -> None:
        self._timeline = timeline
        self._machine = machine
        self._seconds = seconds
        self._then = then
        self._updated_at = timeline.now
        self._version = 0
        machine.want(self, share)
        self.expect()

    def advance(self) -> None:
        """Subtract what was done since the last call."""
        self._seconds -= (self._timeline.now - self._updated_at) / self._machine.slowdown
        self._updated_at = self._timeline.now

    def expect(self) -> None:
        """Schedule the end; a change of the pace before then makes the event stale."""
        self._version += 1
        seconds = max(0.0, self._seconds) * self._machine.slowdown
        self._timeline.at(self._timeline.now + seconds, self._end, self._version)

    def _end(self, version: int) -> None:
        if version == self._version:
            self._machine.want(self, 0.0)
            self._then()
