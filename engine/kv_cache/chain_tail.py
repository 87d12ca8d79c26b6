"""Forgets the end of a chain of blocks that nobody will use again, before it would be evicted."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.tiers import CacheTiers


def forget_tail(
    pool: BlockPool, tiers: CacheTiers | None, block_hashes: Sequence[bytes], num_kept: int
) -> int:
    """Forget the last blocks of a chain in all tiers, up to one that is used or that another chain shares.

    Call this only between steps.

    Args:
        block_hashes: the chain, from a prompt's first block on.
        num_kept: number of its first blocks that stay.

    Returns:
        The number of blocks that were cached in any tier and no longer are.
    """
    tail: list[bytes] = []
    child = None
    for each in reversed(block_hashes[num_kept:]):
        if pool.is_shared(each, child) or (tiers is not None and tiers.is_shared(each, child)):
            break
        tail.append(each)
        child = each
    cached = pool if tiers is None else tiers
    num_cached = sum(each in cached for each in tail)
    pool.forget(tail)
    if tiers is not None:
        tiers.on_blocks_forgotten(tail)
    return num_cached
