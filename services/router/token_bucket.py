"""A budget of tokens that fills at a steady rate."""

from __future__ import annotations

from collections.abc import Callable

SECONDS_PER_MINUTE = 60.0
ROUNDING_TOKENS = 1e-6
"""So little may be missing: who waited exactly as long as told must not be refused for a rounding error."""


class TokenBucket:
    """Holds at most a minute's worth. It may go into debt, which must be paid before more is taken.

    Prompts are taken beforehand; answers, whose length nobody knows, are spent as they come. In any time T,
    what is taken and spent is at most capacity + rate · T + what was spent in debt.

    Args:
        tokens_per_minute: the rate, and the capacity.
        clock: seconds that only go forward.
    """

    def __init__(self, tokens_per_minute: int, clock: Callable[[], float]) -> None:
        self.tokens_per_minute = tokens_per_minute
        self._rate = tokens_per_minute / SECONDS_PER_MINUTE
        self._clock = clock
        self._level = float(tokens_per_minute)
        self._filled_at = clock()

    def wait_seconds(self, num_tokens: int) -> float:
        """Return the seconds until so many can be taken, if nobody else takes any; 0: now.

        More than the capacity can be taken when the bucket is full.
        """
        self._fill()
        missing = min(num_tokens, self.tokens_per_minute) - self._level
        return missing / self._rate if missing > ROUNDING_TOKENS else 0.0

    def spend(self, num_tokens: int) -> None:
        """Take tokens, into debt if need be."""
        self._fill()
        self._level -= num_tokens

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.tokens_per_minute, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
