"""Keeps a sequence within a budget of KV tokens, by giving back the blocks that matter least.

After PagedEviction (Chitty-Venkata et al., 2025, arXiv 2509.04377). A token matters by the ratio of its
value's norm to its key's: small keys draw attention, large values change what it gives. A block matters
by the mean over its tokens, and here over layers and heads, since a block holds all of them. Whole blocks go,
when the prompt is computed and then each time that the newest block becomes full: a table stays a table, and
no kernel knows.

It is an approximation. The paper evicts single tokens of the prompt before it is cut into blocks; here blocks
are cut, hashed and shared before anything is known of the budget, so prompts lose blocks too. The newest full
block always stays.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.kv_memory import KvMemory
from quire.engine.sequence import NO_BLOCK, Sequence

Score = Callable[[KvMemory, list[int]], list[float]]
"""Returns how much each of a table's blocks matters, given in the order of their positions."""


def importance(memory: KvMemory, block_ids: list[int]) -> list[float]:
    """Return the mean ratio of value norm to key norm of each block."""
    keys, values = memory.vectors(block_ids).norm(dim=-1).unbind(dim=2)
    ratios: list[float] = (values / keys.clamp(min=1e-6)).flatten(1).mean(dim=1).tolist()
    return ratios


class PagedEviction:
    """Chooses what a sequence gives back."""

    def __init__(self, memory: KvMemory, score: Score = importance) -> None:
        self._memory = memory
        self._score = score

    def choose(self, sequence: Sequence) -> list[int]:
        """Return the places in the table whose blocks go now."""
        budget, size = sequence.params.kv_budget_tokens, self._memory.shape.block_size
        is_decoding = sequence.num_computed_tokens >= sequence.num_prompt_tokens
        if budget is None or not is_decoding or sequence.stops_after_prefill:
            return []
        num_full = sequence.num_computed_tokens // size
        places = [place for place in range(num_full) if sequence.block_table[place] != NO_BLOCK]
        # One block of the budget is being filled, or about to be.
        num_excess = len(places) - (budget // size - 1)
        if num_excess <= 0:
            return []
        scores = self._score(self._memory, [sequence.block_table[place] for place in places[:-1]])
        ranked = sorted(zip(scores, places, strict=False))
        return [place for _, place in ranked[:num_excess]]
