"""Asks the index which workers hold the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quire.kvindex.block_hash import CacheScope, block_hashes
from quire.kvindex.index import PrefixIndex


class PrefixLookup(Protocol):
    """Knows how much of a prompt each worker holds."""

    async def cached_tokens(self, token_ids: Sequence[int], scope: CacheScope) -> Mapping[str, int]:
        """Return the tokens held in a scope, by worker id; empty where nothing is known. Never raises."""
        ...


class NoIndex:
    """Knows nothing: workers are chosen by load and by the prompt's own order."""

    async def cached_tokens(self, token_ids: Sequence[int], scope: CacheScope) -> Mapping[str, int]:
        """Return nothing."""
        return {}


class IndexLookup:
    """Looks prompts up in an index that answers in time or with nothing."""

    def __init__(self, index: PrefixIndex, root_of: Callable[[CacheScope], bytes], block_size: int) -> None:
        self._index = index
        self._root_of = root_of
        self._block_size = block_size

    async def cached_tokens(self, token_ids: Sequence[int], scope: CacheScope) -> Mapping[str, int]:
        """Return the tokens held, by worker id; empty where nothing is known."""
        hashes = block_hashes(self._root_of(scope), token_ids, self._block_size)
        holdings = await self._index.look_up(hashes) if hashes else []
        return {holding.worker.worker_id: holding.num_blocks * self._block_size for holding in holdings}
