"""Decides which workers change their roles, so that prefill and decode both keep up with the requests.

The controller measures the demand of the requests (``demand.py``), and predicts their times for each split of
the workers (``pressure.py``). It moves the workers towards the split whose largest pressure is the smallest.
It makes no network calls, so the simulator decides with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quire.routing.demand import Demand, DemandMeter, RoleState, Totals
from quire.routing.pressure import Pressure, Targets, predict

SUSTAINED_SECONDS = 2.0
"""A change must have been better for this long before it is made."""
PAUSE_SECONDS = 3.0
"""Least time between two changes in the same direction."""
REVERSAL_SECONDS = 30.0
"""Least time between a change and one in the opposite direction; each further reversal doubles it."""
MAX_REVERSAL_SECONDS = 480.0
CALM_SECONDS = 600.0
"""Time without a reversal after which the least time before one is ``REVERSAL_SECONDS`` again."""
MIN_PRESSURE = 0.75
"""While all predicted times are below this share of their targets, nothing changes."""
MARGIN = 0.2
"""A change must lower the pressure by at least this share of it."""


class RoleChange(NamedTuple):
    """A worker that should get another role.

    Attributes:
        min_seconds_in_role: the worker should refuse if it changed its role more recently than this.
        cause: one of ``CAUSES``.
        details: the pressures before and after, for the log.
    """

    worker_id: str
    role: str
    min_seconds_in_role: float
    cause: str
    details: str


NONE_LEFT = "none_left"
CAUSES = (*Pressure._fields, NONE_LEFT)
"""Why a role changes: the pressure that decided, or that no decode worker is left."""


class _Split(NamedTuple):
    """A number of prefill workers, and the pressure that is predicted with it."""

    num_prefill: int
    pressure: Pressure


class _Timing:
    """Decides when a role that is needed more may be given to workers; times are readings of one clock."""

    def __init__(self) -> None:
        self._needed: str | None = None
        self._needed_since = 0.0
        self._asked_at = float("-inf")
        self._changed_to: str | None = None
        self._changed_at = float("-inf")
        self._reversed_at = float("-inf")
        self._reversal_seconds = REVERSAL_SECONDS

    def note_change(self, role: str, now: float) -> None:
        """Note that a worker has got a role."""
        if self._changed_to not in (None, role):
            is_calm = now - self._reversed_at >= CALM_SECONDS
            longer = min(2 * self._reversal_seconds, MAX_REVERSAL_SECONDS)
            self._reversal_seconds = REVERSAL_SECONDS if is_calm else longer
            self._reversed_at = now
        self._changed_to, self._changed_at = role, now

    def is_time_for(self, role: str | None, now: float, *, is_urgent: bool) -> bool:
        """Return whether workers should get a role now; call this at every decision.

        Args:
            role: the role that is needed more; None: neither.
            is_urgent: whether earlier changes do not matter.
        """
        if role != self._needed:
            self._needed, self._needed_since = role, now
        if role is None or now - self._needed_since < SUSTAINED_SECONDS:
            return False
        earliest = self._asked_at + PAUSE_SECONDS
        if not is_urgent and self._changed_to is not None:
            pause = PAUSE_SECONDS if self._changed_to == role else self._reversal_seconds
            earliest = max(earliest, self._changed_at + pause)
        if now < earliest:
            return False
        self._asked_at = now
        return True


class ElasticRoles:
    """Watches the workers, and says now and then which ones should change their roles.

    Three things keep it from changing roles back and forth: a change must be better by ``MARGIN`` for
    ``SUSTAINED_SECONDS``; changes in one direction are ``PAUSE_SECONDS`` apart; and a change in the opposite
    direction waits for ``REVERSAL_SECONDS``, which double with each reversal until ``CALM_SECONDS`` pass
    without one. Changes by an operator or another router count like its own.
    """

    def __init__(self, targets: Targets, clock: Callable[[], float]) -> None:
        self._targets = targets
        self._clock = clock
        self._meter = DemandMeter()
        self._timing = _Timing()
        self._roles: Mapping[str, str] = {}
        self.pressure = Pressure(0.0, 0.0, 0.0)
        """Pressure of the present split, as of the last decision with a decode worker."""

    def decide(self, workers: Sequence[RoleState], totals: Totals) -> list[RoleChange]:
        """Return the changes that should be made now; call this about once a second.

        At least one decode worker stays. If there is none, a prefill worker becomes one.

        Args:
            workers: the workers that take requests.
            totals: what all requests have demanded so far.
        """
        now = self._clock()
        self._note_changes(workers, now)
        num_prefill = sum(worker.role == "prefill" for worker in workers)
        demand = self._meter.measure(workers, totals, now)
        if workers and num_prefill == len(workers):
            is_time = self._timing.is_time_for("decode", now, is_urgent=True)
            return [_first_decode(workers)] if is_time else []
        split = self._better_split(demand, num_prefill, len(workers)) if workers else None
        role = None
        if split is not None:
            role = "prefill" if split.num_prefill > num_prefill else "decode"
        if not self._timing.is_time_for(role, now, is_urgent=False) or split is None or role is None:
            return []
        return self._changes(workers, role, num_prefill, split)

    def _note_changes(self, workers: Sequence[RoleState], now: float) -> None:
        """Note the roles that have changed since the last decision."""
        for worker in workers:
            if self._roles.get(worker.worker_id, worker.role) != worker.role:
                self._timing.note_change(worker.role, now)
        self._roles = {worker.worker_id: worker.role for worker in workers}

    def _better_split(self, demand: Demand, num_prefill: int, num_workers: int) -> _Split | None:
        """Return the best split if it is much better than the present one, which is not good enough."""
        splits = [
            _Split(count, predict(demand, self._targets, count, num_workers - count))
            for count in range(num_workers)
        ]
        self.pressure = splits[num_prefill].pressure
        best = min(splits, key=lambda each: (each.pressure.worst, abs(each.num_prefill - num_prefill)))
        is_better = best.pressure.worst <= (1 - MARGIN) * self.pressure.worst
        return best if is_better and self.pressure.worst >= MIN_PRESSURE else None

    def _changes(
        self, workers: Sequence[RoleState], role: str, num_prefill: int, split: _Split
    ) -> list[RoleChange]:
        """Return the changes that lead to a split; those workers change that have the least of their work."""
        others = [worker for worker in workers if worker.role != role]
        if role == "prefill":
            others.sort(key=lambda worker: (worker.resident_tokens, worker.worker_id))
        else:
            others.sort(key=lambda worker: (worker.pending_seconds, worker.worker_id))
        before, after = f"{num_prefill} of {len(workers)}", f"{split.num_prefill} of {len(workers)}"
        details = (
            f"prefill workers: {before}, {_text(self.pressure)}; {after}, {_text(split.pressure)} expected"
        )
        return [
            RoleChange(worker.worker_id, role, REVERSAL_SECONDS, self.pressure.cause, details)
            for worker in others[: abs(split.num_prefill - num_prefill)]
        ]


def _first_decode(workers: Sequence[RoleState]) -> RoleChange:
    # All routers choose the same worker, so that only one changes.
    chosen = min(worker.worker_id for worker in workers)
    return RoleChange(chosen, "decode", 0.0, NONE_LEFT, "no decode worker takes requests")


def _text(pressure: Pressure) -> str:
    return f"TTFT {pressure.ttft:.2f}, TPOT {pressure.tpot:.2f}, room {pressure.room:.2f} of the targets"
