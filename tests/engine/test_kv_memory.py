"""Blocks as runs of bytes: their size, views and copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.kv_cache.memory import KvMemory, dtype_name
from quire.kvindex.kv_layout import KvShape

CPU = torch.device("cpu")
DEVICES = pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            torch.device("cuda"),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ),
    ],
    ids=str,
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]


@settings(max_examples=100)
@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    head_dim=st.sampled_from([4, 20, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_block_has_the_bytes_that_its_shape_says(
    layers: int, heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    shape = KvShape(layers, heads, block_size, head_dim, dtype_name(dtype))
    memory = KvMemory(shape, 2, CPU)
    num_vectors = layers * 2 * heads
    assert shape.vector_bytes == num_vectors * block_size * head_dim * dtype.itemsize
    assert shape.num_scales == sum(each[0].numel() for each in memory.scales if each is not None)
    assert 0 <= shape.block_bytes - shape.vector_bytes - 4 * shape.num_scales < 32
    assert shape.block_bytes % (16 if shape.is_quantized else dtype.itemsize) == 0
    assert len(memory.read(1)) == shape.block_bytes


def finish_steps(memory: KvMemory) -> None:
    """Wait, as a step does at its end, before others read its blocks."""
    if memory.device.type == "cuda":
        torch.cuda.synchronize()


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_is_copied_with_all_that_belongs_to_it(dtype: torch.dtype, device: torch.device) -> None:
    shape = KvShape(2, 3, 4, 8, dtype_name(dtype))
    memory = KvMemory(shape, 4, device)
    host = KvMemory(shape, 4, CPU, is_pinned=device.type == "cuda")
    for layer, scales in zip(memory.layers, memory.scales, strict=True):
        layer[1] = torch.arange(192).view(2, 3, 4, 8).remainder(7).to(dtype)
        if scales is not None:
            scales[1] = torch.arange(6).view(2, 3) + 0.5
    finish_steps(memory)
    payload = memory.read(1)
    memory.copy_within([(1, 3)])
    memory.copy_out(host, [(3, 0), (0, 2)])
    memory.copy_in(host, [(0, 2)])
    finish_steps(memory)
    other = KvMemory(shape, 1, device)
    other.write(0, memory.read(2))
    assert memory.read(2) == memory.read(3) == host.read(0) == other.read(0) == payload
    assert torch.equal(other.vectors([0]), memory.vectors([1]))
    assert torch.equal(memory.vectors([0]), torch.zeros((1, 2, 2, 3, 4, 8), device=device))


@DEVICES
def test_blocks_copied_from_the_host_can_be_read_at_once(device: torch.device) -> None:
    """As a block that a peer asked for is, between two steps."""
    shape = KvShape(4, 2, 16, 64, "float32")
    memory = KvMemory(shape, 256, device)
    host = KvMemory(shape, 256, CPU, is_pinned=device.type == "cuda")
    host.blocks[:] = torch.arange(256)[:, None, None, None, None, None]
    for _ in range(10):
        memory.blocks.fill_(-1.0)
        memory.copy_in(host, [(block_id, 255 - block_id) for block_id in range(256)])
        assert memory.read(0) == host.read(255)
        memory.copy_within([(0, 1)])
        assert memory.read(1) == host.read(255)


def test_a_payload_of_another_size_is_refused() -> None:
    memory = KvMemory(KvShape(1, 1, 4, 8, "int8"), 2, CPU)
    with pytest.raises(ValueError, match="a block has"):
        memory.write(0, b"short")


@DEVICES
def test_copies_to_the_host_have_the_bytes_from_before_the_next_step(device: torch.device) -> None:
    shape = KvShape(4, 2, 16, 64, "float32")
    memory = KvMemory(shape, 64, device)
    host = KvMemory(shape, 64, CPU, is_pinned=device.type == "cuda")
    places = [(block_id, 63 - block_id) for block_id in range(64)]
    for number in range(1, 6):
        memory.blocks.fill_(number)
        memory.copy_out(host, places)
        memory.blocks.fill_(-1.0)
        if (copied := memory.copies_event()) is not None:
            copied.synchronize()
        assert (host.blocks == number).all()
        memory.copy_in(host, places)
        assert (memory.blocks == number).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_a_block_with_a_scale_that_nothing_can_be_divided_by_is_refused(
    dtype: torch.dtype, scale: float
) -> None:
    memory = KvMemory(KvShape(2, 3, 4, 8, dtype_name(dtype)), 3, CPU)
    for scales in memory.scales:
        assert scales is not None
        scales[1:] = 1.0
    memory.write(2, memory.read(1))
    last = memory.scales[1]
    assert last is not None
    last[1, 1, 2] = scale
    with pytest.raises(ValueError, match="scale"):
        memory.write(2, memory.read(1))
    assert memory.scales[1] is not None
    assert memory.scales[1][2].eq(1.0).all()
