"""Names a prompt's blocks, and asks the index which workers hold the first of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quire.kvindex.block_hash import CacheScope, block_hashes
from quire.kvindex.guarded_index import GuardedIndex


class KnownPrefix(NamedTuple):
    """What is known of a prompt's blocks."""

    block_hashes: Sequence[bytes]
    held_tokens: Mapping[str, int] | None
    """Tokens held, by worker id; None where the index was not asked or did not answer."""


class PrefixLookup:
    """Looks prompts up in the index, which answers in time or not at all.

    Args:
        index: None asks nobody.
        root_of: returns the root of a scope's hashes.
    """

    def __init__(
        self, index: GuardedIndex | None, root_of: Callable[[CacheScope], bytes], block_size: int
    ) -> None:
        self._index = index
        self._root_of = root_of
        self._block_size = block_size

    async def look_up(self, token_ids: Sequence[int], scope: CacheScope) -> KnownPrefix:
        """Return the full blocks' hashes and who holds them in a scope. Never raises."""
        hashes = block_hashes(self._root_of(scope), token_ids, self._block_size)
        if self._index is None:
            return KnownPrefix(hashes, None)
        if not hashes:
            return KnownPrefix(hashes, {})
        holdings = await self._index.look_up(hashes)
        if holdings is None:
            return KnownPrefix(hashes, None)
        held = {holding.worker.worker_id: holding.num_blocks * self._block_size for holding in holdings}
        return KnownPrefix(hashes, held)
