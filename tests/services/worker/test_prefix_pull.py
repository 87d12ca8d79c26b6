"""What a pull refuses to write, and when it writes nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from quire.engine.engine_thread import EngineThread
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.kv_layout import KvShape
from quire.kvtransfer.errors import BadBlockError, DigestMismatchError
from quire.kvtransfer.frame import Frame, digest
from quire.protos import worker_pb2
from quire.sampling.params import SamplingParams
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
