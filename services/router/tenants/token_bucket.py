"""Implements a token bucket: a budget of tokens that fills at a steady rate."""

from __future__ import annotations

from collections.abc import Callable

SECONDS_PER_MINUTE = 60.0
ROUNDING_TOKENS = 1e-6
"""Shortfall that is ignored, so that a rounding error does not refuse a client that waited exactly as long as
it was asked to."""


class TokenBucket:
    """A budget of at most one minute's tokens.

    It may go into debt, and the debt must be repaid before more tokens are taken.

    Prompts are taken in advance. Answers are spent as they arrive, because their length is not known. In any
    time T, the tokens taken and spent are at most capacity + rate · T + the tokens that were spent in debt.

    Args:
        tokens_per_minute: the rate, and also the capacity.
        clock: monotonic clock in seconds.
    """

    def __init__(self, tokens_per_minute: int, clock: Callable[[], float]) -> None:
        self.tokens_per_minute = tokens_per_minute
        self._rate = tokens_per_minute / SECONDS_PER_MINUTE
        self._clock = clock
        self._level = float(tokens_per_minute)
        self._filled_at = clock()

    def wait_seconds(self, num_tokens: int) -> float:
        """Return the seconds until ``num_tokens`` can be taken if no others are taken meanwhile; 0: now.

        More tokens than the capacity can be taken when the bucket is full.
        """
        self._fill()
        missing = min(num_tokens, self.tokens_per_minute) - self._level
        return missing / self._rate if missing > ROUNDING_TOKENS else 0.0

    def spend(self, num_tokens: int) -> None:
        """Take tokens; if too few are left, the bucket goes into debt."""
        self._fill()
        self._level -= num_tokens

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.tokens_per_minute, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
