"""Detects whether an engine's thread is stuck: if a device hangs, a step does not end.

A step with a long prompt is slow, but not stuck. A step is therefore compared with earlier steps of its kind:
their number of computed tokens and of cached tokens is the same to a power of two. If one of these numbers is
larger than in any earlier step, the step gets more time, because its duration is unknown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from quire.engine.sequences.schedule import StepKind

TICK_SECONDS = 0.1
"""Seconds between two observations."""
_MOST_OBSERVED_SECONDS = 1.5 * TICK_SECONDS
"""Most seconds that count between two observations.

If observations are late, the machine is busy and steps are late too.
"""
STALL_SECONDS = 1.5
"""Seconds below which a step never counts as stalled, unless ``max_seconds`` is lower."""
UNKNOWN_STALL_SECONDS = 8.0
"""The same for a command, a step that swaps blocks, and a step that is larger than all earlier ones."""
STALL_STEPS = 10.0
"""Multiple of the longest recent step of the same kind below which a step never counts as stalled.

It allows for long steps on a CPU, and for a machine that is suddenly busy.
"""
KEPT_SHARE = 0.98
"""Factor by which each step lowers the longest time, so that one slow step does not count indefinitely."""


class StepWatch:
    """Measures how long an engine's thread has been in one step.

    The thread calls ``begin``, ``end_step`` and ``rest``; the event loop calls ``observe`` every
    ``TICK_SECONDS``. Only observed time counts. A thread therefore does not count as stalled if the whole
    process was stopped for a while, and steps may take longer on a busy machine.

    Args:
        max_seconds: seconds in one step after which the thread is stuck.
        known_seconds: seconds that a step takes, by its kind.
        clock: returns seconds and never goes back.
    """

    def __init__(
        self,
        max_seconds: float,
        known_seconds: Mapping[StepKind, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self._longest_by_kind = dict(known_seconds or {})
        self._longest_seconds = max(self._longest_by_kind.values(), default=0.0)
        self._kind: StepKind | None = None
        self._allowed_seconds = math.inf
        """Seconds from which the present step counts as stalled."""
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
        self._kind = None
        self._allow(UNKNOWN_STALL_SECONDS, self._longest_seconds)
        self._is_working = True

    def plan(self, kind: StepKind) -> None:
        """Record the work of the present step."""
        self._kind = kind
        longest = self._longest_by_kind.get(kind)
        if longest is None:
            larger = (seconds for each, seconds in self._longest_by_kind.items() if kind.fits_in(each))
            longest = min(larger, default=None)
        if longest is not None:
            self._allow(STALL_SECONDS, longest)

    def end_step(self) -> None:
        """Record that the step has ended."""
        seconds = self._clock() - self._began_at
        self._longest_seconds = max(seconds, KEPT_SHARE * self._longest_seconds)
        if self._kind is not None:
            longest = self._longest_by_kind.get(self._kind, 0.0)
            self._longest_by_kind[self._kind] = max(seconds, KEPT_SHARE * longest)

    def rest(self) -> None:
        """Record that the thread has nothing to do."""
        self._is_working = False

    # --- from the event loop ------------------------------------------------------------------------------

    def observe(self) -> None:
        """Count the time since the last observation if the thread is still in the same step."""
        now = self._clock()
        elapsed, self._observed_at = now - self._observed_at, now
        if self._is_working and self._num_begun == self._num_seen:
            self.stalled_seconds += min(elapsed, _MOST_OBSERVED_SECONDS)
        else:
            self.stalled_seconds = 0.0
            self._num_seen = self._num_begun

    @property
    def is_stalled(self) -> bool:
        """Whether the step takes so long that other workers should take over this engine's requests."""
        # ``stalled_seconds`` may still be the time of an earlier step until the next observation.
        is_observed = self._is_working and self._num_begun == self._num_seen
        return is_observed and self.stalled_seconds >= self._allowed_seconds

    @property
    def is_stuck(self) -> bool:
        """Whether the step takes so long that it is not expected to end."""
        return self.stalled_seconds >= max(self._max_seconds, STALL_STEPS * self._longest_seconds)

    def _allow(self, seconds: float, longest_seconds: float) -> None:
        self._allowed_seconds = max(min(seconds, self._max_seconds), STALL_STEPS * longest_seconds)
