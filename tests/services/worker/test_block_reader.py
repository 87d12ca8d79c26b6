"""Which digests are kept with a pool's blocks, and until when."""

from __future__ import annotations

import pytest
import torch

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.shared_memory import allocate_shared
from quire.kvindex.kv_layout import KvShape
from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import DigestMismatchError
from quire.kvtransfer.frame import Frame
from quire.services.worker.blocks import block_reader
from quire.services.worker.blocks.block_reader import BlockReader

SHAPE = KvShape(1, 1, 4, 8, "float16")
HASH = b"0123456789abcdef"


class Setup:
    """A pool, its memory, and how often a digest was computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
        shared = allocate_shared(4 * SHAPE.block_bytes) if is_shared else None
        self.memory = KvMemory(SHAPE, 4, torch.device("cpu"), shared=shared)
        self.pool = BlockPool(4)
        self.reader = BlockReader(self.memory, self.pool)
        self.num_digests = 0
        monkeypatch.setattr(block_reader, "digest", self._digest)

    def _digest(self, block_hash: bytes, payload: frames.Buffer) -> int:
        self.num_digests += 1
        return frames.digest(block_hash, payload)

    def sealed(self, fill: int) -> int:
        """Return a block of these bytes that has its hash."""
        [block_id] = self.pool.allocate(1)
        self.memory.write(block_id, bytes([fill]) * SHAPE.block_bytes)
        assert self.pool.seal(block_id, HASH) == block_id
        return block_id

    def frame(self, block_id: int, block_hash: bytes = HASH) -> Frame:
        return self.reader.frame(0, block_hash, block_id)


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def setup(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Setup:
    return Setup(monkeypatch, request.param)


def test_a_sealed_block_is_digested_once(setup: Setup) -> None:
    block_id = setup.sealed(7)
    first, second = setup.frame(block_id), setup.frame(block_id)
    assert setup.num_digests == 1
    assert first.digest == second.digest == frames.digest(HASH, bytes([7]) * SHAPE.block_bytes)
    second.check_copy(bytes(second.payload))


def test_memory_that_changed_after_it_was_first_sent_is_found(setup: Setup) -> None:
    block_id = setup.sealed(7)
    setup.frame(block_id)
    setup.memory.write(block_id, bytes([8]) * SHAPE.block_bytes)
    frame = setup.frame(block_id)
    with pytest.raises(DigestMismatchError):
        frame.check_copy(bytes(frame.payload))
    assert setup.reader.damaged([(block_id, HASH)]) == [HASH]


def test_a_block_that_is_allocated_again_is_digested_again(setup: Setup) -> None:
    block_id = setup.sealed(7)
    setup.frame(block_id)
    setup.pool.free([block_id])
    setup.pool.clear_cache()
    assert setup.sealed(9) == block_id
    frame = setup.frame(block_id)
    frame.check_copy(bytes([9]) * SHAPE.block_bytes)
    assert setup.num_digests == 2


def test_a_block_without_a_hash_is_read_again_when_it_changed(setup: Setup) -> None:
    [block_id] = setup.pool.allocate(1)
    setup.frame(block_id, b"")
    setup.memory.write(block_id, bytes([1]) * SHAPE.block_bytes)
    setup.frame(block_id, b"").check_copy(bytes([1]) * SHAPE.block_bytes)
    assert setup.num_digests == 2


def test_a_hash_that_the_block_does_not_have_yet_keeps_nothing(setup: Setup) -> None:
    """A thread may read a block for a request that has ended while the same prompt is computed into it."""
    [block_id] = setup.pool.allocate(1)
    setup.frame(block_id)
    setup.memory.write(block_id, bytes([5]) * SHAPE.block_bytes)
    setup.pool.seal(block_id, HASH)
    setup.frame(block_id).check_copy(bytes([5]) * SHAPE.block_bytes)


def test_blocks_that_are_right_or_were_never_sent_are_not_damaged(setup: Setup) -> None:
    block_id = setup.sealed(7)
    assert setup.reader.damaged([(block_id, HASH)]) == []
    setup.frame(block_id)
    assert setup.reader.damaged([(block_id, HASH)]) == []
