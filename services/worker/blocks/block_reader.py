"""Reads the blocks that this worker sends to others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.memory import KvMemory
from quire.kvtransfer.frame import Frame, digest


class _Kept(NamedTuple):
    generation: int
    block_hash: bytes
    digest: int


class BlockReader:
    """Makes the frames of a pool's blocks, and keeps the digests of sealed blocks with them.

    A block that is sent often is digested once. Its digest then also shows whether its memory has changed
    since it was first sent. A kept digest holds as long as the block's generation in the pool, since a sealed
    block is not written again before it is allocated again.
    """

    def __init__(self, memory: KvMemory, pool: BlockPool) -> None:
        self._memory = memory
        self._pool = pool
        self._kept: dict[int, _Kept] = {}
        self.block_size = memory.shape.block_size

    def frame(self, index: int, block_hash: bytes, block_id: int) -> Frame:
        """Return the frame of a block that is pinned; may be called in any thread.

        The frame's payload is the block itself if the pool is on the CPU, else a copy.
        """
        # The generation is read first, and whether the block is sealed before its digest is computed: if the
        # block is allocated again meanwhile, what is kept has an old generation.
        generation = self._pool.generation(block_id)
        is_sealed = bool(block_hash) and self._pool.hash_of(block_id) == block_hash
        kept = self._kept.get(block_id)
        payload = self._memory.payload_or_copy(block_id)
        if kept is not None and kept[:2] == (generation, block_hash):
            return Frame(index, block_hash, payload, kept.digest, block_id)
        value = digest(block_hash, payload)
        if is_sealed:
            self._kept[block_id] = _Kept(generation, block_hash, value)
        return Frame(index, block_hash, payload, value, block_id)

    def damaged(self, blocks: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """Return the hashes of the blocks (id, hash) whose bytes no longer have the digest that was kept."""
        found = []
        for block_id, block_hash in blocks:
            kept = self._kept.get(block_id)
            if kept is None or kept[:2] != (self._pool.generation(block_id), block_hash):
                continue
            if digest(block_hash, self._memory.payload_or_copy(block_id)) != kept.digest:
                found.append(block_hash)
        return found
