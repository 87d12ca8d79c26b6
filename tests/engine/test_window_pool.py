"""Blocks with two parts: which frames they take, and which are taken from them first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quire.engine.kv_cache.block_pool import NoFreeBlocksError
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.window_pool import WindowPool, pool_of
from quire.kvindex.kv_layout import KvShape

SHAPE = KvShape(4, 1, 4, 8, "float32", window=9, window_layers=(0, 1, 2))
"""A block is one frame that lasts and three that a window of two blocks shows."""
NUM_BLOCKS, LASTING, WHOLE = 4, 1, 4


def make_pool(num_blocks: int = NUM_BLOCKS) -> tuple[KvMemory, WindowPool]:
    memory = KvMemory(SHAPE, num_blocks, torch.device("cpu"))
    pool = pool_of(memory)
    assert isinstance(pool, WindowPool)
    return memory, pool


def hashes(number: int, name: bytes = b"a") -> list[bytes]:
    return [name + bytes([index]) for index in range(number)]


def seal_chain(pool: WindowPool, block_ids: list[int], name: bytes = b"a") -> list[int]:
    chain = hashes(len(block_ids), name)
    return [
        pool.seal(block_id, chain[index], chain[index - 1] if index else None)
        for index, block_id in enumerate(block_ids)
    ]


def test_bare_blocks_take_only_the_frames_that_last() -> None:
    memory, pool = make_pool()
    block_ids = pool.allocate(5, num_bare=4)  # 4 frames, and 4 for the whole block
    assert pool.counts == (2, 0, 2)
    assert [memory.is_bare(each) for each in block_ids] == [True] * 4 + [False]
    with pytest.raises(NoFreeBlocksError, match="3 blocks needed, 2 of 4 left"):
        pool.allocate(3)
    more = pool.allocate(8, num_bare=8)
    assert pool.num_allocatable == 0
    assert pool.num_in_use == 13
    pool.check_conservation()
    pool.free(block_ids)
    pool.free(more)
    assert pool.counts == (4, 0, 0)
    pool.check_conservation()


def test_a_window_part_is_idle_when_all_readers_have_passed() -> None:
    _, pool = make_pool()
    block_ids = pool.allocate(2)
    pool.share(block_ids[:1])
    pool.pass_by(block_ids[:1])
    assert pool.counts.used == 2
    pool.pass_by(block_ids[:1])
    assert pool.counts == (2, 0, 2)  # 5 of 16 frames are needed
    assert pool.num_allocatable == 2
    assert pool.size_of(2, 1) == 2
    pool.free(block_ids[:1], num_passed=1)
    assert pool.allocate(11, num_bare=11)  # 8 free frames, and the 3 idle ones
    assert pool.num_allocatable == 0
    pool.check_conservation()


def test_a_reader_that_leaves_lets_the_window_part_become_idle() -> None:
    _, pool = make_pool()
    [block_id] = pool.allocate(1)
    pool.share([block_id])
    pool.pass_by([block_id])
    pool.free([block_id])  # the one that had not passed
    assert len(pool.allocate(15, num_bare=15)) == 15
    pool.check_conservation()


def test_a_prefix_ends_where_a_window_is_whole() -> None:
    _, pool = make_pool(8)
    block_ids = seal_chain(pool, pool.allocate(4))
    pool.pass_by(block_ids[:2])
    pool.free(block_ids, num_passed=2)
    assert pool.look_up(hashes(4)) == block_ids
    assert pool.look_up(hashes(3)) == block_ids[:3]
    taken = pool.allocate(17, num_bare=17)  # 16 frames are free; one block loses its window part
    assert pool.look_up(hashes(1)) == []
    assert pool.look_up(hashes(2)) == []
    assert pool.look_up(hashes(3)) == block_ids[:3]
    pool.free(taken)
    taken = pool.allocate(20, num_bare=20)
    assert pool.look_up(hashes(3)) == []
    assert pool.look_up(hashes(4)) == block_ids
    pool.check_conservation()


def test_a_common_beginning_keeps_its_window_longer_than_cached_blocks() -> None:
    _, pool = make_pool(8)
    first = seal_chain(pool, pool.allocate(2))
    pool.note_start(hashes(2))
    pool.pass_by(first)
    other = seal_chain(pool, pool.allocate(2), b"b")
    pool.free(other)
    pool.allocate(6)  # 4 free blocks, and those of the other prompt
    assert pool.look_up(hashes(2)) == first
    assert pool.look_up(hashes(2, b"b")) == []
    pool.allocate(1, num_bare=1)
    assert pool.look_up(hashes(2)) == []
    pool.check_conservation()


def test_a_bare_block_gets_the_window_part_of_its_duplicate() -> None:
    memory, pool = make_pool(8)
    known = seal_chain(pool, pool.allocate(2, num_bare=2))
    pool.free(known)
    assert pool.look_up(hashes(2)) == []
    again = pool.allocate(2)
    payload = bytes(range(128)) * (SHAPE.block_bytes // 128)
    memory.write(again[1], payload)
    generation = pool.generation(known[1])
    assert seal_chain(pool, again) == known
    assert pool.look_up(hashes(2)) == known
    assert memory.read(known[1])[SHAPE.bare_bytes :] == payload[SHAPE.bare_bytes :]
    assert pool.generation(known[1]) == generation + 1  # a digest of the bare block is none of this one
    pool.check_conservation()


def test_evicted_blocks_keep_their_bytes_until_they_are_saved() -> None:
    memory, pool = make_pool(2)
    saved: list[tuple[bytes, bytes]] = []

    class Lower:
        def on_block_sealed(self, block_hash: bytes, parent_hash: bytes | None) -> None:
            pass

        def on_block_stripped(self, block_id: int, block_hash: bytes) -> None:
            pass

        def on_blocks_evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
            saved.extend((block_hash, memory.read(block_id)) for block_id, block_hash in blocks)

        def on_blocks_forgotten(self, block_hashes: Sequence[bytes]) -> None:
            pass

    pool._lower = Lower()
    block_ids = pool.allocate(2)
    payloads = [bytes([number]) * SHAPE.block_bytes for number in (1, 2)]
    for block_id, payload in zip(block_ids, payloads, strict=True):
        memory.write(block_id, payload)
    pool.free(seal_chain(pool, block_ids))
    pool.allocate(2)
    assert saved == [(hashes(2)[1], payloads[1]), (hashes(2)[0], payloads[0])]
    pool.check_conservation()
