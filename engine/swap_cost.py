"""What it costs to bring a preempted group back: measured, not guessed."""

from __future__ import annotations

_FIRST_COPY_BYTES_PER_SECOND = 2e9
"""Assumed until the first swap has been measured."""
_MIN_TOKENS = 32
"""Steps with fewer tokens say little about computing a prompt again."""
_WEIGHT = 0.2
"""Of the latest measurement in the running mean."""


class SwapCost:
    """Running means of the time to compute a token and to copy a block."""

    def __init__(self, block_bytes: int) -> None:
        self._block_seconds = block_bytes / _FIRST_COPY_BYTES_PER_SECOND
        self._token_seconds = 0.0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note a forward pass."""
        if num_tokens >= _MIN_TOKENS:
            self._token_seconds = _mean(self._token_seconds, seconds / num_tokens)

    def swapped(self, num_blocks: int, seconds: float) -> None:
        """Note blocks that were copied between pool and host."""
        if num_blocks:
            self._block_seconds = _mean(self._block_seconds, seconds / num_blocks)

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying blocks out and back is faster than computing the tokens again."""
        return 2 * num_blocks * self._block_seconds < num_tokens * self._token_seconds


def _mean(before: float, latest: float) -> float:
    return latest if before == 0.0 else (1 - _WEIGHT) * before + _WEIGHT * latest
