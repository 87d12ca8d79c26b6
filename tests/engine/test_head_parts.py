"""Parts of a block by KV heads: what all ranks have makes up the block, for every pair of divisions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_memory import KvMemory
from quire.engine.parallel.head_parts import part_shape, put_part, take_part
from quire.engine.parallel.shares import Shares
from quire.kvindex.kv_layout import KvShape

CPU = torch.device("cpu")
MOST = 16


@st.composite
def divisions(draw: st.DrawFn, num_kv_heads: int) -> list[range]:
    """Return the heads of each of up to 16 ranks, as an attention is divided."""
    every = [
        (Shares(num_segments, num_kv_heads * group, num_kv_heads), size)
        for group in (1, 2, 4)
        for num_segments in (1, 2, 4, 8, 16)
        if num_kv_heads * group % num_segments == 0
        for size in range(1, MOST + 1)
    ]
    possible = [(shares, size) for shares, size in every if shares.problem(size) is None]
    shares, size = draw(st.sampled_from(possible))
    return [shares.own_kv_heads(rank, size) for rank in range(size)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvShape, list[range], list[range]]:
    num_kv_heads = draw(st.integers(1, MOST))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"]))
    # Three values of one byte leave a gap before the scales.
    shape = KvShape(draw(st.integers(1, 3)), num_kv_heads, draw(st.sampled_from([1, 4])), 3, dtype)
    return shape, draw(divisions(num_kv_heads)), draw(divisions(num_kv_heads))


def random_block(shape: KvShape) -> np.ndarray:
    """Return a block without padding: what no head has stays 0."""
    generator = np.random.default_rng(shape.num_kv_heads)
    block = np.zeros(shape.block_bytes, np.uint8)
    block[: shape.vector_bytes] = generator.integers(0, 255, shape.vector_bytes)
    block[shape.scales] = generator.integers(0, 255, shape.scales.stop - shape.scales.start)
    return block


@given(cases())
def test_the_parts_of_one_division_make_up_those_of_another(
    case: tuple[KvShape, list[range], list[range]],
) -> None:
    shape, writers, readers = case
    block = random_block(shape)
    sent, received = np.zeros_like(block), np.zeros_like(block)
    for heads in writers:
        put_part(sent, shape, heads, take_part(block, shape, heads))
    assert (sent == block).all()
    for heads in readers:
        put_part(received, shape, heads, take_part(sent, shape, heads))
    assert (received == block).all()


@given(cases())
def test_a_part_is_what_a_process_with_these_heads_has(
    case: tuple[KvShape, list[range], list[range]],
) -> None:
    """The vectors and scales of a part are those of its heads in the whole block."""
    shape, writers, _ = case
    whole = KvMemory(shape, 1, CPU)
    whole._bytes[0] = torch.from_numpy(random_block(shape))
    for heads in writers:
        part = KvMemory(part_shape(shape, heads), 1, CPU)
        part._bytes[0] = torch.from_numpy(take_part(random_block(shape), shape, heads))
        own = slice(heads.start, heads.stop)
        for ours, theirs in zip(part.layers, whole.layers, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs[:, :, own].contiguous().view(torch.uint8))
        for own_scales, scales in zip(part.scales, whole.scales, strict=True):
            if own_scales is not None and scales is not None:
                assert own_scales.tolist() == scales[:, :, own].tolist() or not own_scales.isfinite().all()
