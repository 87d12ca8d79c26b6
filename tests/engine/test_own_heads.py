"""Ranks that share blocks: each one has its own heads, and together they have every byte."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.shared_memory import SharedMemory
from quire.engine.model.parallel_shares import Shares
from quire.kvindex.kv_layout import KvShape

CPU = torch.device("cpu")
MOST = 16
SEGMENTS = (1, 2, 4, 8, 16)


def shares_of(num_kv_heads: int) -> list[tuple[Shares, int]]:
    """Return all shares of so many key-value heads and up to four times as many heads, with their sizes."""
    every = (
        Shares(num_segments, num_kv_heads * group, num_kv_heads)
        for group in range(1, 5)
        for num_segments in SEGMENTS
        if num_kv_heads * group % num_segments == 0
    )
    sizes = range(1, MOST + 1)
    return [(each, size) for each, size in itertools.product(every, sizes) if each.problem(size) is None]


@pytest.mark.parametrize("num_kv_heads", range(1, MOST + 1))
def test_ranks_have_whole_groups_of_heads_or_a_part_of_one(num_kv_heads: int) -> None:
    for shares, num_ranks in shares_of(num_kv_heads):
        group = shares.num_heads // num_kv_heads
        borders = shares.borders(num_ranks)
        assert borders == sorted(set(borders))
        assert (borders[0], borders[-1], len(borders)) == (0, shares.num_segments, num_ranks + 1)
        heads = [shares.own(shares.num_heads, rank, num_ranks) for rank in range(num_ranks)]
        kv_heads = [shares.own_kv_heads(rank, num_ranks) for rank in range(num_ranks)]
        assert [head for own in heads for head in range(own.start, own.stop)] == list(range(shares.num_heads))
        for own, own_kv in zip(heads, kv_heads, strict=True):
            assert {head // group for head in range(own.start, own.stop)} == set(own_kv)
            is_whole = own.start % group == 0 and own.stop % group == 0
            assert is_whole or len(own_kv) == 1


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_sizes_that_divide_the_heads_give_equal_shares(num_kv_heads: int) -> None:
    shares = Shares(8, 8, num_kv_heads)
    for num_ranks in (1, 2, 4, 8):
        assert shares.borders(num_ranks) == [8 // num_ranks * rank for rank in range(num_ranks + 1)]
        assert {len(shares.own_kv_heads(rank, num_ranks)) for rank in range(num_ranks)} == {
            max(1, num_kv_heads // num_ranks)
        }


def test_every_size_up_to_the_number_of_segments_divides_a_power_of_two_of_heads() -> None:
    for num_kv_heads, num_ranks in itertools.product((1, 2, 4, 8), range(1, 9)):
        assert Shares(8, 8, num_kv_heads).problem(num_ranks) is None
        loads = [len(range(*pair)) for pair in itertools.pairwise(Shares(8).borders(num_ranks))]
        assert max(loads) - min(loads) <= 1
    assert Shares(8).problem(9) is not None


@pytest.mark.parametrize("num_kv_heads", range(1, MOST + 1))
def test_blocks_that_some_ranks_write_are_whole_for_others(num_kv_heads: int) -> None:
    """Every pair of sizes, replicated heads included, against the bytes of a process without ranks."""
    shape = KvShape(2, num_kv_heads, 4, 8, "float32")
    whole = KvMemory(shape, 3, CPU)
    whole.blocks.copy_(torch.arange(whole.blocks.numel()).view(whole.blocks.shape))
    payloads = [whole.read(block_id) for block_id in range(3)]
    divisions = {
        tuple(shares.own_kv_heads(rank, size) for rank in range(size))
        for shares, size in shares_of(num_kv_heads)
    }
    for writers, readers in itertools.product(divisions, repeat=2):
        sent = rank_memories(shape, writers)
        for memory, own in zip(sent, writers, strict=True):
            for layer, all_heads in zip(memory.layers, whole.layers, strict=True):
                layer.copy_(all_heads[:, :, own.start : own.stop])
        received = rank_memories(shape, readers)
        for block_id, payload in enumerate(payloads):
            assert sent[0].read(block_id) == payload
            received[0].write(block_id, sent[0].payload(block_id))
        for memory, own in zip(received, readers, strict=True):
            for layer, all_heads in zip(memory.layers, whole.layers, strict=True):
                assert torch.equal(layer, all_heads[:, :, own.start : own.stop])


def test_the_scales_of_8_bit_blocks_are_those_of_the_own_heads() -> None:
    shape = KvShape(2, 4, 4, 8, "int8")
    first, second = rank_memories(shape, (range(2), range(2, 4)))
    for memory, value in ((first, 2.0), (second, 3.0)):
        for layer, scales in zip(memory.layers, memory.scales, strict=True):
            layer.fill_(1)
            assert scales is not None
            scales.fill_(value)
    vectors = first.vectors([0, 2])
    assert torch.equal(vectors[:, :, :, :2], torch.full((2, 2, 2, 2, 4, 8), 2.0))
    assert torch.equal(vectors[:, :, :, 2:], torch.full((2, 2, 2, 2, 4, 8), 3.0))


def rank_memories(shape: KvShape, heads: tuple[range, ...]) -> list[KvMemory]:
    shared = SharedMemory(torch.zeros(3 * shape.block_bytes, dtype=torch.uint8), -1)
    return [KvMemory(shape, 3, CPU, shared=shared, own_heads=each) for each in heads]
