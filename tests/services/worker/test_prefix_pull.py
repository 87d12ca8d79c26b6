"""What a pull refuses to write, and when it writes nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from quire.engine.engine_thread import EngineThread
from quire.engine.kv_cache.block_pins import BlockPins
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.window_pool import WindowPool
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.kv_layout import KvShape
from quire.kvtransfer.errors import BadBlockError, DigestMismatchError
from quire.kvtransfer.frame import Frame, Transport, digest
from quire.protos import worker_pb2
from quire.sampling.params import SamplingParams
from quire.services.worker.blocks import prefix_pull
from quire.services.worker.blocks.prefix_pull import PrefixPuller, _PulledBlocks

BLOCK_SIZE = 4


async def test_a_pull_takes_no_block_that_would_end_the_engine() -> None:
    memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "int8"), 8, torch.device("cpu"))
    pulled = _PulledBlocks("pull", cast("EngineThread", None), memory, [b"hash"])
    pulled._block_ids = [1]
    with pytest.raises(BadBlockError, match="block 0: a stored scale"):
        pulled.write([Frame(0, b"hash", bytes(memory.shape.block_bytes))])
    assert pulled.num_written == 0


def pulled_blocks_of(memory: KvMemory) -> _PulledBlocks:
    made = _PulledBlocks("pull", cast("EngineThread", Mock()), memory, [b"hash"] * 2)
    made._block_ids = [1, 2]
    return made


def test_only_blocks_whose_copies_are_right_count_as_written() -> None:
    memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "float32"), 8, torch.device("cpu"))
    pulled = pulled_blocks_of(memory)
    payload = bytes(range(memory.shape.block_bytes))
    right = digest(b"hash", payload)
    with pytest.raises(DigestMismatchError):
        pulled.write([Frame(0, b"hash", payload, right), Frame(1, b"hash", payload, right + 1)])
    assert pulled.num_written == 1
    assert memory.read(1) == payload


def test_after_a_pull_has_ended_a_late_block_is_not_written() -> None:
    memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "float32"), 8, torch.device("cpu"))
    pulled = pulled_blocks_of(memory)
    pulled.close()
    pulled.write([Frame(0, b"hash", b"x" * memory.shape.block_bytes)])
    assert pulled.num_written == 0
    assert memory.read(1) == bytes(memory.shape.block_bytes)


async def test_a_wait_for_this_workers_engine_does_not_end_a_pull() -> None:
    engine = Mock()
    engine.pin.return_value = [1]

    async def call_late(function: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(0.05)
        return function(engine)

    thread, layout = Mock(call=call_late), Mock(block_size=BLOCK_SIZE)
    puller = PrefixPuller(thread, Mock(), layout, Mock(), Mock(), Mock())
    sequence = Sequence("pull", list(range(BLOCK_SIZE + 1)), BLOCK_SIZE + 1, SamplingParams(), b"root")
    summary = await puller.pull(sequence, worker_pb2.PullSource(num_blocks=1, timeout_ms=1))
    assert (summary.num_held_blocks, summary.failure) == (1, "")


async def test_blocks_of_a_shorter_pull_can_be_used_up_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer sends the last blocks whole, which windows show after them."""
    shape = KvShape(2, 1, BLOCK_SIZE, 1, "float32", window=6, window_layers=(0,))
    memory = KvMemory(shape, 16, torch.device("cpu"))
    assert memory.frame_tables is not None
    pool = WindowPool(memory, memory.frame_tables)
    pins = BlockPins(pool)
    engine = SimpleNamespace(pin=pins.pin, pins=pins)

    class ShorterPull:
        transport = Transport.MESSAGES
        num_blocks = 5

        def __init__(self, *args: object, block_hashes: list[bytes], **options: object) -> None:
            self.block_hashes = block_hashes

        async def __aenter__(self) -> ShorterPull:
            return self

        async def __aexit__(self, *exception: object) -> None:
            pass

        async def frames(self) -> AsyncIterator[list[Frame]]:
            for index, block_hash in enumerate(self.block_hashes[: self.num_blocks]):
                is_bare = index < shape.num_bare(self.num_blocks)
                payload = bytes(shape.bare_bytes if is_bare else shape.block_bytes)
                yield [Frame(index, block_hash, payload, digest(block_hash, payload))]

    async def call(function: Callable[[Any], Any]) -> Any:
        return function(engine)

    monkeypatch.setattr(prefix_pull, "BlockPull", ShorterPull)
    thread = Mock(call=call, post=lambda function: function(engine))
    puller = PrefixPuller(thread, memory, Mock(block_size=BLOCK_SIZE), Mock(), Mock(), Mock())
    sequence = Sequence("pull", list(range(8 * BLOCK_SIZE)), 8 * BLOCK_SIZE, SamplingParams(), b"root")
    summary = await puller.pull(sequence, worker_pb2.PullSource(num_blocks=7))
    assert (summary.num_blocks, summary.failure) == (5, "")
    assert len(pool.look_up(sequence.block_hashes)) == 5
    pool.check_conservation()
    assert pool.num_in_use == 0
