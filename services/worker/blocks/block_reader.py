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
    is_bare: bool
    digest: int


class BlockReader:
    """Makes the frames of a pool's blocks, and caches the digests of sealed blocks.

    A block that is sent often is digested once. The digest then also shows whether the block's memory has
    changed since it was first sent. A cached digest is valid for one generation of the block in the pool,
    since a sealed block is not written before it is allocated again.
    """

    def __init__(self, memory: KvMemory, pool: BlockPool) -> None:
        self._memory = memory
        self._pool = pool
        self._kept: dict[int, _Kept] = {}
        self.block_size = memory.shape.block_size

    def frame(self, index: int, block_hash: bytes, block_id: int, *, is_bare: bool = False) -> Frame:
        """Return the frame of a pinned block, or of the part that a bare one has. Any thread may call this.

        The frame's payload is the block itself if the pool is on the CPU and has no bare blocks, else a copy.
        """
        # The generation and the seal are read before the digest is computed. If the block is allocated again
        # meanwhile, the cached digest has an old generation.
        generation = self._pool.generation(block_id)
        is_sealed = bool(block_hash) and self._pool.hash_of(block_id) == block_hash
        kept = self._kept.get(block_id)
        payload = self._memory.payload_or_copy(block_id, is_bare=is_bare)
        frame_ids = self._memory.frame_ids(block_id, is_bare=is_bare)
        if kept is not None and kept[:3] == (generation, block_hash, is_bare):
            return Frame(index, block_hash, payload, kept.digest, block_id, frame_ids)
        value = digest(block_hash, payload)
        if is_sealed:
            self._kept[block_id] = _Kept(generation, block_hash, is_bare, value)
        return Frame(index, block_hash, payload, value, block_id, frame_ids)

    def damaged(self, blocks: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """Return the hashes of the blocks (id, hash) whose bytes no longer match the cached digest."""
        found = []
        for block_id, block_hash in blocks:
            kept = self._kept.get(block_id)
            if kept is None or kept[:2] != (self._pool.generation(block_id), block_hash):
                continue
            if not kept.is_bare and self._memory.is_bare(block_id):
                continue  # a part of what was digested has been freed
            payload = self._memory.payload_or_copy(block_id, is_bare=kept.is_bare)
            if digest(block_hash, payload) != kept.digest:
                found.append(block_hash)
        return found
