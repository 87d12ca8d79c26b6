"""Hashes a prompt's blocks, and looks up in the index which workers have cached its leading blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quire.kvindex.block_hash import CacheScope, block_hashes
from quire.kvindex.guarded_index import GuardedIndex

INLINE_HASHED_TOKENS = 8192
"""Prompts up to this length are hashed on the event loop (below 1 ms); longer ones in a thread."""


class KnownPrefix(NamedTuple):
    """Hashes of a prompt's full blocks, and the workers that have cached a prefix of them."""

    block_hashes: Sequence[bytes]
    cached_by_worker: Mapping[str, int] | None
    """Cached tokens by worker id; None if the index was not asked or did not answer."""


class PrefixLookup:
    """Looks prompts up in the index; a late answer counts as no answer.

    Args:
        index: the index; None: only hashes are computed.
        root_of: returns the root hash of a scope.
    """

    def __init__(
        self, index: GuardedIndex | None, root_of: Callable[[CacheScope], bytes], block_size: int
    ) -> None:
        self._index = index
        self._root_of = root_of
        self._block_size = block_size

    async def look_up(self, token_ids: Sequence[int], scope: CacheScope) -> KnownPrefix:
        """Return the hashes of the full blocks in a scope, and the workers that cached them. Never raises."""
        root = self._root_of(scope)
        if len(token_ids) <= INLINE_HASHED_TOKENS:
            hashes = block_hashes(root, token_ids, self._block_size)
        else:
            hashes = await asyncio.to_thread(block_hashes, root, token_ids, self._block_size)
        if self._index is None:
            return KnownPrefix(hashes, None)
        if not hashes:
            return KnownPrefix(hashes, {})
        holdings = await self._index.look_up(hashes)
        if holdings is None:
            return KnownPrefix(hashes, None)
        cached_by_worker = {
            holding.worker.worker_id: holding.num_blocks * self._block_size for holding in holdings
        }
        return KnownPrefix(hashes, cached_by_worker)
