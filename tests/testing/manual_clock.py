"""A clock for code that takes one."""

from __future__ import annotations


class ManualClock:
    """Returns the time that a test sets.

    Attributes:
        now: the time in seconds.
    """

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
