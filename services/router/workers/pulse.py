"""Distinguishes a worker that has vanished from one that is late, by its signs of life.

Signs of life are its reports and new connections to it (``silences.py``). A worker has vanished once its
silence is several times as long as its recent silences.
"""

from __future__ import annotations

from dataclasses import dataclass

LATE_SECONDS = 0.8
"""Silence after which a worker is late: others are preferred, and the router tries to connect again."""
LEAST_LIMIT_SECONDS = 1.6
"""Silence after which a worker has vanished if it has been punctual."""
LIMIT_FACTOR = 3.0
"""A worker has vanished if it is silent for this many times its longest silence."""
HALF_LIFE_SECONDS = 10.0
"""Time in which a past silence loses half of its weight."""


@dataclass(slots=True)
class Pulse:
    """The silences of one worker.

    Attributes:
        silence: seconds since the last sign of life.
        longest: longest silence that a sign of life has ended; it shrinks with time.
    """

    silence: float = 0.0
    longest: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether a sign of life is overdue."""
        return self.silence >= LATE_SECONDS

    @property
    def has_stopped(self) -> bool:
        """Whether the silence is far longer than earlier ones."""
        return self.silence >= max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * self.longest)

    def wait(self, seconds: float) -> None:
        """Let seconds pass without a sign of life."""
        self.silence += seconds
        self.longest *= 0.5 ** (seconds / HALF_LIFE_SECONDS)

    def hear(self) -> None:
        """End the silence; remember its length unless the worker seemed to have vanished."""
        if not self.has_stopped:
            self.longest = max(self.longest, self.silence)
        self.silence = 0.0
