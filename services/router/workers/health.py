"""Tracks a worker's health as the router knows it, and decides whether the worker gets requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.services.router.workers.pulse import Pulse

PENALTY_SECONDS = 2.0
"""Time for which a worker stays unhealthy after a failure."""


class WorkerHealth:
    """The health of one worker, from the time when it joins; only the events below change it.

    The facts are independent of each other, except that a worker is either left or lost:

    | Fact           | Begins with             | Ends with                | Consequence                    |
    |----------------|-------------------------|--------------------------|--------------------------------|
    | late           | silence: LATE_SECONDS   | heard, returned          | symptom                        |
    | unanswered     | probe_missed            | answered                 | symptom                        |
    | unleased       | lease_ended             | lease_checked            | symptom                        |
    | set aside      | failed                  | returned                 | symptom; no requests           |
    | stalled        | reported_stalled(True)  | reported_stalled(False)  | symptom; no requests           |
    | draining       | reported_draining(True) | reported_draining(False) | no requests; its answers move  |
    | failed lately  | failed                  | PENALTY_SECONDS later    | unhealthy                      |
    | maybe stranger | proof_missing           | proved, reconnected      | probed even if it has a lease  |
    | left           | left                    | never                    | no requests; running ones stay |
    | lost           | lost                    | never                    | no requests; running ones fail |

    * **No requests**: the worker gets no new request, even if there is no other worker.
    * **Symptom**: the worker may be unable to serve. Only its own answer or report can show that it is able.
    * **Unhealthy**: it has a symptom or failed lately. It gets requests only if all others are unhealthy too.

    A process that starts again at the same address is another worker, with another epoch and another health.

    Args:
        clock: returns the time in seconds.
        is_draining: whether the worker drains when it joins.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_draining: bool = False) -> None:
        self._clock = clock
        self._is_gone = False
        self._is_lost = False
        self._pulse = Pulse()
        self._num_unanswered = 0
        self._unanswered_since = 0.0
        self._answered_at = 0.0
        self._is_unleased = False
        self._is_set_aside = False
        self._is_stalled = False
        self._is_draining = is_draining
        self._failed_at = -math.inf
        self._may_be_stranger = False

    # --- what follows from the facts ----------------------------------------------------------------------

    @property
    def can_serve(self) -> bool:
        """Whether the worker may get requests."""
        return not (self._is_draining or self._is_set_aside or self._is_stalled or self.is_gone)

    @property
    def is_unhealthy(self) -> bool:
        """Whether it has a symptom or failed lately, so that other workers are preferred."""
        return self.has_symptom or self._clock() < self._failed_at + PENALTY_SECONDS

    @property
    def has_symptom(self) -> bool:
        """Whether it may be unable to serve."""
        is_answering = self._num_unanswered == 0 and not self._pulse.is_late
        return not is_answering or self._is_unleased or self._is_set_aside or self._is_stalled

    # --- the facts ----------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        """Whether it finishes its requests and takes no new ones."""
        return self._is_draining

    @property
    def is_stalled(self) -> bool:
        """Whether it reports that its engine makes no progress."""
        return self._is_stalled

    @property
    def is_set_aside(self) -> bool:
        """Whether it has not answered a probe since it failed."""
        return self._is_set_aside

    @property
    def is_late(self) -> bool:
        """Whether a sign of life is overdue."""
        return self._pulse.is_late

    @property
    def has_vanished(self) -> bool:
        """Whether its silence is far longer than its earlier silences."""
        return self._pulse.has_stopped

    @property
    def silence(self) -> float:
        """Seconds since its last sign of life."""
        return self._pulse.silence

    @property
    def answered_at(self) -> float:
        """Time at which the last probe that it answered began, a reading of the clock."""
        return self._answered_at

    @property
    def may_be_stranger(self) -> bool:
        """Whether another process may have answered a call to it."""
        return self._may_be_stranger

    @property
    def is_gone(self) -> bool:
        """Whether it has left or is lost."""
        return self._is_gone

    @property
    def is_lost(self) -> bool:
        """Whether its calls have ended because it was silent: new ones would never return."""
        return self._is_lost

    def has_missed_probes(self, seconds: float) -> bool:
        """Return whether it has answered no probe for some seconds.

        One late answer may be this process's own delay; a second unanswered probe rules that out.
        """
        return self._num_unanswered > 1 and self._clock() - self._unanswered_since >= seconds

    # --- signs of life ------------------------------------------------------------------------------------

    def passed(self, seconds: float) -> None:
        """Count seconds without a sign of life, unless the worker is set aside."""
        if not self._is_set_aside:
            self._pulse.wait(seconds)

    def heard(self) -> None:
        """Record a sign of life, unless the worker is set aside."""
        if not self._is_set_aside:
            self._pulse.hear()

    def failed(self) -> bool:
        """Record that it broke off, refused a call or vanished; return whether this sets it aside."""
        was_set_aside, self._is_set_aside = self._is_set_aside, True
        self._failed_at = self._clock()
        return not was_set_aside

    # --- probes -------------------------------------------------------------------------------------------

    def answered(self, begin: float) -> None:
        """Record that a process at its address answered a probe, and when the probe began."""
        self._num_unanswered = 0
        self._answered_at = max(self._answered_at, begin)

    def returned(self, begin: float) -> bool:
        """Record that the worker itself answered a probe; return whether it was set aside until now.

        An answer to a probe that began before the last failure does not show that the worker is able again.
        """
        if not self._is_set_aside or begin < self._failed_at:
            return False
        self._is_set_aside = False
        self._pulse.hear()
        return True

    def probe_missed(self, begin: float) -> None:
        """Record that it did not answer a probe in time, and when the probe began."""
        if self._num_unanswered == 0:
            self._unanswered_since = begin
        self._num_unanswered += 1

    def lease_ended(self) -> None:
        """Record that its lease is gone, and that it will be asked whether it stays."""
        self._is_unleased = True

    def lease_checked(self) -> None:
        """Record that it was asked, whether it answered or not."""
        self._is_unleased = False

    def proof_missing(self) -> None:
        """Record that a call failed before the worker had proved its identity."""
        self._may_be_stranger = True

    def proved(self) -> None:
        """Record that it proved its identity in a probe."""
        self._may_be_stranger = False

    def reconnected(self) -> None:
        """Record that its connection was replaced, and that no call over the new one has failed."""
        self._may_be_stranger = False

    # --- what it says about itself ------------------------------------------------------------------------

    def reported_stalled(self, is_stalled: bool) -> bool:
        """Record the report whether its engine makes no progress; return whether this is a change."""
        was_stalled, self._is_stalled = self._is_stalled, is_stalled
        return is_stalled != was_stalled

    def reported_draining(self, is_draining: bool) -> bool:
        """Record the report whether it drains; return whether this is a change."""
        was_draining, self._is_draining = self._is_draining, is_draining
        return is_draining != was_draining

    # --- its end ------------------------------------------------------------------------------------------

    def left(self) -> None:
        """Record that the worker has left the router; its running requests continue."""
        self._is_gone = True

    def lost(self) -> None:
        """Record that it was silent for too long, so that it leaves the router and its calls end."""
        if not self._is_gone:
            self._is_gone = self._is_lost = True
