"""Finds a cached block whose first tokens match a prompt, after the prompt's cached full blocks.

::

    cached     [ a b c d ][ e f g h ]
    prompt     [ a b c d ][ e f x y ]     a full hit, then two tokens: copy the second block, compute x y

Full blocks are found by hash. This file compares the tokens of the blocks that follow the same parent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.publish_ledger import BlockContent

Describe = Callable[[list[tuple[bytes, BlockContent]]], None]
"""Function that is told consecutive blocks that a sequence has sealed or found in the cache."""

MAX_SIBLINGS = 32
"""Number of most recently used blocks to compare after one parent. A root may have any number of children."""


class PartialHit(NamedTuple):
    """A block of the pool, and how many of its leading tokens match."""

    block_id: int
    num_tokens: int


class BlockTokens:
    """The tokens of sealed blocks, by the hash of the block before them.

    Lookups skip evicted blocks, which are removed later. At most twice as many blocks are therefore known as
    the pool has.

    Args:
        pool: the blocks.
        describe: is told the blocks that it remembers, if the pool has them; None: nobody is.
    """

    def __init__(self, pool: BlockPool, describe: Describe | None = None) -> None:
        self._pool = pool
        self._describe = describe
        self._siblings: dict[bytes, dict[bytes, array[int]]] = {}
        self.num_blocks = 0
        """Number of blocks whose tokens are known, evicted ones included."""

    def remember(self, sequence: Sequence, first: int, last: int, block_size: int) -> None:
        """Remember the tokens of a sequence's sealed blocks ``first..last - 1`` as the most recently used."""
        described = []
        for index in range(first, last):
            block_hash, parent_hash = sequence.block_hashes[index], sequence.parent_hash(index)
            siblings = self._siblings.setdefault(parent_hash, {})
            token_ids = siblings.pop(block_hash, None)
            if token_ids is None:
                token_ids = array("I", sequence.token_ids[index * block_size : (index + 1) * block_size])
                self.num_blocks += 1
            siblings[block_hash] = token_ids
            if len(siblings) > MAX_SIBLINGS:
                del siblings[next(iter(siblings))]
                self.num_blocks -= 1
            if self._describe is not None and self._pool.look_up([block_hash]):
                described.append((block_hash, BlockContent(parent_hash, token_ids, index == 0)))
        if self._describe is not None and described:
            self._describe(described)
        if self.num_blocks > 2 * self._pool.num_blocks:
            self._forget_evicted()

    def find(self, parent_hash: bytes, token_ids: list[int]) -> PartialHit | None:
        """Return the pool's block after ``parent_hash`` that shares the most leading tokens, if any.

        Args:
            parent_hash: hash of the block before it.
            token_ids: the tokens to match, at most one block.
        """
        best = None
        for block_hash, held_ids in self._siblings.get(parent_hash, {}).items():
            num_tokens = sum(takewhile(bool, map(eq, held_ids, token_ids)))
            if num_tokens > (best.num_tokens if best else 0):
                for block_id in self._pool.look_up([block_hash]):
                    best = PartialHit(block_id, num_tokens)
        return best

    def _forget_evicted(self) -> None:
        held = (
            (parent, {name: ids for name, ids in siblings.items() if self._pool.look_up([name])})
            for parent, siblings in self._siblings.items()
        )
        self._siblings = {parent: siblings for parent, siblings in held if siblings}
        self.num_blocks = sum(map(len, self._siblings.values()))
