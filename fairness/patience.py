"""The order of one client's requests: by arrival, by priority, and by deadline.

A request stands where one would that arrived some seconds later, or earlier if its patience is negative. So
waiting counts as much as priority, and no request waits for ever: those that arrive long enough after it come
behind it, whatever their priority.
"""

from __future__ import annotations

LEVEL_SECONDS = 10.0
"""Waiting this long counts as much as one level of priority."""
MAX_PRIORITY = 100
"""Largest priority; the smallest is its negative."""


def patience(priority: int, remaining_seconds: float | None) -> float:
    """Return how many seconds later a request stands in the order of arrival.

    Args:
        priority: lower is sooner, as in vLLM.
        remaining_seconds: time until the deadline; None: there is none. Only one that is nearer than the
            request's patience brings it forward.
    """
    seconds = LEVEL_SECONDS * (1 + priority)
    return seconds if remaining_seconds is None else min(seconds, remaining_seconds)
