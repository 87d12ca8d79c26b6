"""Ranks that share blocks: each one has its own heads, and together they have every byte."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.engine.kv_memory import KvMemory
from quire.engine.parallel.plan import own_parts
from quire.engine.shared_memory import SharedMemory
from quire.kvindex.kv_layout import KvShape

CPU = torch.device("cpu")
MOST = 16


def sizes(num_heads: int) -> list[int]:
    """Return the numbers of ranks that can have these heads."""
    return [each for each in range(1, MOST + 1) if num_heads % each == 0 or each % num_heads == 0]


@pytest.mark.parametrize("num_heads", range(1, MOST + 1))
def test_ranks_have_heads_in_order_and_equal_shares(num_heads: int) -> None:
    for num_ranks in sizes(num_heads):
        shares = [list(own_parts(num_heads, rank, num_ranks)) for rank in range(num_ranks)]
        owners = [[rank for rank in range(num_ranks) if head in shares[rank]] for head in range(num_heads)]
        assert len({len(each) for each in shares}) == 1
        assert len({len(each) for each in owners}) == 1, "each head is on as many ranks as any other"
        assert sorted({*itertools.chain(*shares)}) == list(range(num_heads))
        assert shares == sorted(shares)


@pytest.mark.parametrize("num_heads", range(1, MOST + 1))
def test_blocks_that_some_ranks_write_are_whole_for_others(num_heads: int) -> None:
    """Every pair of sizes, replicated heads included, against the bytes of a process without ranks."""
    shape = KvShape(2, num_heads, 4, 8, "float32")
    whole = KvMemory(shape, 3, CPU)
    whole.blocks.copy_(torch.arange(whole.blocks.numel()).view(whole.blocks.shape))
    payloads = [whole.read(block_id) for block_id in range(3)]
    for writers, readers in itertools.product(sizes(num_heads), repeat=2):
        sent = rank_memories(shape, writers)
        for memory, rank in zip(sent, range(writers), strict=True):
            own = own_parts(num_heads, rank, writers)
            for layer, all_heads in zip(memory.layers, whole.layers, strict=True):
                layer.copy_(all_heads[:, :, own.start : own.stop])
        received = rank_memories(shape, readers)
        for block_id, payload in enumerate(payloads):
            assert sent[0].read(block_id) == payload
            received[0].write(block_id, sent[0].payload(block_id))
        for memory, rank in zip(received, range(readers), strict=True):
            own = own_parts(num_heads, rank, readers)
            for layer, all_heads in zip(memory.layers, whole.layers, strict=True):
                assert torch.equal(layer, all_heads[:, :, own.start : own.stop])


def test_the_scales_of_8_bit_blocks_are_those_of_the_own_heads() -> None:
    shape = KvShape(2, 4, 4, 8, "int8")
    shared = SharedMemory(torch.zeros(3 * shape.block_bytes, dtype=torch.uint8), -1)
    first, second = (KvMemory(shape, 3, CPU, shared=shared, own_heads=own_parts(4, r, 2)) for r in range(2))
    for memory, value in ((first, 2.0), (second, 3.0)):
        for layer, scales in zip(memory.layers, memory.scales, strict=True):
            layer.fill_(1)
            assert scales is not None
            scales.fill_(value)
    vectors = first.vectors([0, 2])
    assert torch.equal(vectors[:, :, :, :2], torch.full((2, 2, 2, 2, 4, 8), 2.0))
    assert torch.equal(vectors[:, :, :, 2:], torch.full((2, 2, 2, 2, 4, 8), 3.0))


def rank_memories(shape: KvShape, num_ranks: int) -> list[KvMemory]:
    shared = SharedMemory(torch.zeros(3 * shape.block_bytes, dtype=torch.uint8), -1)
    heads = [own_parts(shape.num_kv_heads, rank, num_ranks) for rank in range(num_ranks)]
    return [KvMemory(shape, 3, CPU, shared=shared, own_heads=each) for each in heads]
