"""Hashes a prompt's blocks, and looks up in the index which workers have cached its leading blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from quire.kvindex.block_hash import CacheScope, block_hashes
from quire.kvindex.guarded_index import GuardedIndex
from quire.routing.placement import PlannedPrompt

INLINE_HASHED_TOKENS = 8192
"""Prompts up to this length are hashed on the event loop (below 1 ms); longer ones in a thread."""


class PrefixLookup:
    """Looks prompts up in the index; a late answer counts as no answer.

    Args:
        index: the index; None: only hashes are computed.
        root_of: returns the root hash of a scope on workers with a cache descriptor.
    """

    def __init__(
        self, index: GuardedIndex | None, root_of: Callable[[bytes, CacheScope], bytes], block_size: int
    ) -> None:
        self._index = index
        self._root_of = root_of
        self._block_size = block_size

    async def look_up(
        self, token_ids: Sequence[int], scope: CacheScope, descriptors: Iterable[bytes]
    ) -> PlannedPrompt:
        """Return the prompt with its full blocks in a scope, and where these are cached. Never raises.

        Args:
            descriptors: cache descriptors of the workers. Blocks have other hashes with each; the prompt gets
                those of the first.
        """
        first, *others = [await self._look_up(token_ids, scope, each) for each in descriptors]
        cached = dict(first.cached_by_worker or {})
        for other in others:
            cached.update(other.cached_by_worker or {})
        return first if first.cached_by_worker is None else first._replace(cached_by_worker=cached)

    async def _look_up(self, token_ids: Sequence[int], scope: CacheScope, descriptor: bytes) -> PlannedPrompt:
        hashes = await self.hash_blocks(token_ids, scope, descriptor)
        cached_by_worker: dict[str, int] | None = None if self._index is None else {}
        if self._index is not None and hashes:
            holdings = await self._index.look_up(hashes)
            cached_by_worker = (
                None
                if holdings is None
                else {holding.worker.worker_id: holding.num_blocks * self._block_size for holding in holdings}
            )
        return PlannedPrompt(len(token_ids), hashes, cached_by_worker)

    async def hash_blocks(
        self, token_ids: Sequence[int], scope: CacheScope, descriptor: bytes
    ) -> list[bytes]:
        """Return the hashes of a prompt's full blocks on workers with a cache descriptor."""
        root = self._root_of(descriptor, scope)
        if len(token_ids) <= INLINE_HASHED_TOKENS:
            return block_hashes(root, token_ids, self._block_size)
        return await asyncio.to_thread(block_hashes, root, token_ids, self._block_size)
