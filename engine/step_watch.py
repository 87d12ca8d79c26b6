"""Detects whether an engine's thread is stuck: if a device hangs, a step does not end."""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_SECONDS = 0.5
"""Seconds between two observations."""
STALL_SECONDS = 8.0
"""Seconds below which a step never counts as stalled, unless ``max_seconds`` is lower."""
STALL_STEPS = 10.0
"""Multiple of the longest recent step below which a step never counts as stalled.

It allows for long steps on a CPU.
"""
KEPT_SHARE = 0.98
"""Factor by which each step lowers the longest time, so that one slow step does not count indefinitely."""


class StepWatch:
    """Measures how long an engine's thread has been in one step.

    The thread calls ``begin``, ``end_step`` and ``rest``; the event loop calls ``observe`` every
    ``TICK_SECONDS``. Only observed time counts, so a thread is not stalled because the whole process was
    stopped for a while.

    Args:
        max_seconds: seconds in one step after which the thread is stuck.
        full_step_seconds: seconds that the largest step takes, if known, else 0.
        clock: returns seconds and never goes back.
    """

    def __init__(
        self,
        max_seconds: float,
        full_step_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self._longest_seconds = full_step_seconds
        self._num_begun = self._num_seen = 0
        self._began_at = 0.0
        self._is_working = False
        self._observed_at = clock()
        self.stalled_seconds = 0.0
        """Observed seconds that the thread has been in the same step or command."""

    # --- from the engine's thread -------------------------------------------------------------------------

    def begin(self) -> None:
        """Record that a step, or a command between two steps, begins."""
        self._num_begun += 1
        self._began_at = self._clock()
        self._is_working = True

    def end_step(self) -> None:
        """Record that the step has ended."""
        seconds = self._clock() - self._began_at
        self._longest_seconds = max(seconds, KEPT_SHARE * self._longest_seconds)

    def rest(self) -> None:
        """Record that the thread has nothing to do."""
        self._is_working = False

    # --- from the event loop ------------------------------------------------------------------------------

    def observe(self) -> None:
        """Count the time since the last observation if the thread is still in the same step."""
        now = self._clock()
        elapsed, self._observed_at = now - self._observed_at, now
        if self._is_working and self._num_begun == self._num_seen:
            self.stalled_seconds += min(elapsed, 4 * TICK_SECONDS)
        else:
            self.stalled_seconds = 0.0
            self._num_seen = self._num_begun

    @property
    def is_stalled(self) -> bool:
        """Whether the step takes so long that other workers should take over this engine's requests."""
        return self._takes_longer_than(min(STALL_SECONDS, self._max_seconds))

    @property
    def is_stuck(self) -> bool:
        """Whether the step takes so long that it is not expected to end."""
        return self._takes_longer_than(self._max_seconds)

    def _takes_longer_than(self, seconds: float) -> bool:
        return self.stalled_seconds >= max(seconds, STALL_STEPS * self._longest_seconds)
