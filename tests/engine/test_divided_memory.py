"""Blocks whose heads lie with several ranks are like blocks in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.kv_memory import KvMemory
from quire.engine.parallel.collectives import RanksError
from quire.engine.parallel.divided_memory import BlockLinks, DividedMemory
from quire.engine.parallel.head_parts import part_shape
from quire.engine.parallel.link import FrameKind, Link, Purpose
from quire.engine.parallel.remote_rank import BlockServer
from quire.engine.parallel.remote_ranks import LEAVING, RankLinks
from quire.kvindex.kv_layout import KvShape
from tests.engine.linked_ranks import link_pair

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_HOST = 6, 3
DIVISIONS = [
    [range(3), range(3, 4)],
    [range(1), range(1, 2), range(2, 4)],
    [range(4), range(4)],
    [range(2), range(2), range(2, 4), range(2, 4)],
]


@contextmanager
def divided(shape: KvShape, heads: list[range]) -> Iterator[tuple[DividedMemory, list[KvMemory], list[Link]]]:
    """Yield the memory of rank 0, that of the other ranks, and the ends of their links."""
    pairs = [(link_pair(), link_pair(Purpose.BLOCKS)) for _ in heads[1:]]
    memories = [KvMemory(part_shape(shape, each), NUM_BLOCKS, CPU) for each in heads[1:]]
    for (steps, blocks), memory in zip(pairs, memories, strict=True):
        server = BlockServer(RankLinks(steps[1], blocks[1]), Event())
        server.memory = memory
        server.start()
    links = BlockLinks([blocks[0] for _, blocks in pairs])
    try:
        yield DividedMemory(shape, NUM_BLOCKS, heads, links), memories, [each[1] for _, each in pairs]
    finally:
        for each in (link for two in pairs for pair in two for link in pair):
            each.close()


def payload(shape: KvShape, seed: int) -> bytes:
    """Return a block with positive scales; what no head has is 0."""
    block = np.zeros(shape.block_bytes, np.uint8)
    generator = np.random.default_rng(seed)
    block[: shape.vector_bytes] = generator.integers(0, 120, shape.vector_bytes)
    block[shape.scales] = generator.uniform(0.1, 2.0, shape.num_scales).astype(np.float32).view(np.uint8)
    return block.tobytes()


ids, host_ids = st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_HOST - 1)
actions = st.one_of(
    st.tuples(st.just("write"), ids, st.integers(0, 99)),
    st.tuples(st.just("copy_within"), ids, ids),
    st.tuples(st.just("copy_out"), ids, host_ids),
    st.tuples(st.just("copy_in"), host_ids, ids),
)


@settings(max_examples=25)
@given(
    st.sampled_from(DIVISIONS),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.lists(actions, max_size=12),
)
def test_divided_blocks_are_like_blocks_in_one_piece(
    heads: list[range], dtype: str, steps: list[tuple[str, int, int]]
) -> None:
    shape = KvShape(2, 4, 4, 3, dtype)
    whole = KvMemory(shape, NUM_BLOCKS, CPU)
    host, other_host = KvMemory(shape, NUM_HOST, CPU), KvMemory(shape, NUM_HOST, CPU)
    with divided(shape, heads) as (memory, parts, _):
        for block_id in range(NUM_BLOCKS):
            for each in (whole, memory):
                each.write(block_id, payload(shape, 1000 + block_id))
        for host_id in range(NUM_HOST):
            for each in (host, other_host):
                each.write(host_id, payload(shape, 2000 + host_id))
        for action, first, second in steps:
            if action == "write":
                for each in (whole, memory):
                    assert each.write(first, payload(shape, second)) == payload(shape, second)
            elif action == "copy_within":
                for each in (whole, memory):
                    each.copy_within([(first, second)])
            else:
                getattr(whole, action)(host, [(first, second)])
                getattr(memory, action)(other_host, [(first, second)])
        for block_id in range(NUM_BLOCKS):
            assert bytes(memory.payload_or_copy(block_id)) == whole.read(block_id)
        for host_id in range(NUM_HOST):
            assert host.read(host_id) == other_host.read(host_id)
        assert torch.equal(memory.vectors([3, 1]), whole.vectors([3, 1]))
        # Each rank's steps see its own heads.
        for own, part in zip(heads, (memory, *parts), strict=True):
            for ours, theirs in zip(part.layers, whole.layers, strict=True):
                assert torch.equal(ours, theirs[:, :, own.start : own.stop])


def test_each_rank_has_the_memory_of_its_own_heads_only() -> None:
    shape = KvShape(4, 8, 16, 64, "float32")
    with divided(shape, [range(4), range(4, 8)]) as (memory, [part], _):
        for each in (memory._own, part):
            assert each.num_bytes == NUM_BLOCKS * shape.block_bytes // 2


def test_a_bad_payload_changes_no_rank() -> None:
    shape = KvShape(2, 4, 4, 3, "int8")
    with divided(shape, DIVISIONS[0]) as (memory, _, _):
        memory.write(0, good := payload(shape, 1))
        bad = bytearray(good)
        # The last scale belongs to another rank.
        bad[shape.scales.stop - 4 : shape.scales.stop] = np.float32(-1.0).tobytes()
        with pytest.raises(ValueError, match="not a positive number"):
            memory.write(0, bytes(bad))
        with pytest.raises(ValueError, match=f"a block has {shape.block_bytes} bytes, got 3"):
            memory.write(0, b"123")
        assert bytes(memory.payload_or_copy(0)) == good


def test_after_a_failure_no_block_is_read() -> None:
    """An answer that was still under way must not be taken for that to the next request."""
    shape = KvShape(2, 4, 4, 3, "float32")
    with divided(shape, DIVISIONS[1]) as (memory, _, links):
        links[1].close()
        with pytest.raises(RanksError):
            memory.payload_or_copy(0)
        with pytest.raises(RanksError):
            memory.payload_or_copy(1)


def test_a_rank_tells_that_it_was_told_to_end() -> None:
    steps, blocks = link_pair(), link_pair(Purpose.BLOCKS)
    leaving = Event()
    with ExitStack() as stack:
        for each in (*steps, *blocks):
            stack.callback(each.close)
        BlockServer(RankLinks(steps[1], blocks[1]), leaving).start()
        links = BlockLinks([blocks[0]])
        assert links.ask({1: (FrameKind.PING, ())}) == {1: b""}
        leaving.set()
        assert links.ask({1: (FrameKind.PING, ())}) == {1: LEAVING}
        blocks[0].close()
        with pytest.raises(RanksError):
            steps[0].receive(FrameKind.DONE)  # without rank 0 there are no steps
