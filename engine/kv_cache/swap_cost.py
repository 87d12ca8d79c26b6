"""Measures the cost of restoring the blocks of a preempted group, by copying or by recomputing."""

from __future__ import annotations

_FIRST_COPY_BYTES_PER_SECOND = 2e9
"""Assumed speed of copies until the first swap has been measured."""
_MIN_TOKENS = 32
"""Smaller steps are not measured, since they say little about the time to recompute a prompt."""
_WEIGHT = 0.2
"""Weight of the latest measurement in the running mean."""


class SwapCost:
    """Keeps running means of the time to compute a token and of the time to copy a block.

    Args:
        block_bytes: bytes of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_seconds = block_bytes / _FIRST_COPY_BYTES_PER_SECOND
        self._token_seconds = 0.0

    def record_forward(self, num_tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of a forward pass."""
        if num_tokens >= _MIN_TOKENS:
            self._token_seconds = _mean(self._token_seconds, seconds / num_tokens)

    def record_swap(self, num_blocks: int, seconds: float) -> None:
        """Record how many blocks were copied between pool and host, and in how many seconds."""
        if num_blocks:
            self._block_seconds = _mean(self._block_seconds, seconds / num_blocks)

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Return whether copying the blocks out and back is faster than recomputing the tokens."""
        return 2 * num_blocks * self._block_seconds < num_tokens * self._token_seconds


def _mean(before: float, latest: float) -> float:
    return latest if before == 0.0 else (1 - _WEIGHT) * before + _WEIGHT * latest
