"""Keeps a sequence within a budget of KV tokens by freeing its least important blocks.

This follows PagedEviction (Chitty-Venkata et al., 2025, arXiv 2509.04377). The importance of a token is the
ratio of its value's norm to its key's norm: tokens with small keys attract attention, and large values change
its output. The importance of a block is the mean over its tokens. Here it is also the mean over layers and
heads, since a block holds all of them. Only whole blocks are evicted: first when the prompt is computed, and
then whenever the newest block becomes full. Block tables therefore remain valid, and the kernels need no
change.

This approximates the paper, which evicts single tokens of the prompt before it splits the prompt into blocks.
Here blocks are filled, hashed and shared before the budget is applied, so whole blocks of prompts are evicted
too. The newest full block is never evicted.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.sequences.sequence import NO_BLOCK, Sequence

Score = Callable[[KvMemory, list[int]], list[float]]
"""Function that returns the importance of each block; it gets the block ids in order of position."""


def importance(memory: KvMemory, block_ids: list[int]) -> list[float]:
    """Return, for each block, the mean ratio of value norm to key norm."""
    keys, values = memory.vectors(block_ids).norm(dim=-1).unbind(dim=2)
    ratios: list[float] = (values / keys.clamp(min=1e-6)).flatten(1).mean(dim=1).tolist()
    return ratios


class PagedEviction:
    """Chooses the blocks that a sequence with a KV budget frees."""

    def __init__(self, memory: KvMemory, score: Score = importance) -> None:
        self._memory = memory
        self._score = score

    def choose(self, sequence: Sequence) -> list[int]:
        """Return which blocks to free now, as indices into the sequence's table."""
        budget, size = sequence.kv_budget, self._memory.shape.block_size
        is_decoding = sequence.num_computed_tokens >= sequence.num_prompt_tokens
        if budget is None or not is_decoding or sequence.stops_after_prefill:
            return []
        num_full = sequence.num_computed_tokens // size
        indices = [index for index in range(num_full) if sequence.block_table[index] != NO_BLOCK]
        # One block of the budget is reserved for the tokens that are being added.
        num_excess = len(indices) - (budget // size - 1)
        if num_excess <= 0:
            return []
        scores = self._score(self._memory, [sequence.block_table[index] for index in indices[:-1]])
        ranked = sorted(zip(scores, indices, strict=False))
        return [index for _, index in ranked[:num_excess]]
