"""The layout of a block: the sizes of its parts, and what its descriptor tells apart."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kvindex.kv_layout import LAYOUT_VERSION, KvLayout, KvShape

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
LAYOUT = KvLayout(2, 3, 16, 8, "float16", "digest", "bfloat16", "float32-1")
sizes = st.integers(1, 9)
GEMMA_3_27B = tuple(layer for layer in range(62) if layer % 6 != 5)
shapes = st.builds(KvShape, sizes, sizes, sizes, sizes, st.sampled_from(sorted(ITEM_BYTES)))


@given(shape=shapes)
def test_a_block_holds_its_values_and_then_one_scale_for_each_head(shape: KvShape) -> None:
    num_heads = shape.num_layers * 2 * shape.num_kv_heads
    assert shape.vector_bytes == num_heads * shape.block_size * shape.head_dim * ITEM_BYTES[shape.dtype]
    assert shape.vector_bytes <= shape.scales.start <= shape.scales.stop <= shape.block_bytes
    if ITEM_BYTES[shape.dtype] > 1:
        assert shape.block_bytes == shape.vector_bytes
        assert shape.num_scales == 0
        return
    assert shape.scales.stop - shape.scales.start == 4 * num_heads
    for num_bytes, least in (
        (shape.scales.start, shape.vector_bytes),
        (shape.block_bytes, shape.scales.stop),
    ):
        assert num_bytes % 16 == 0
        assert num_bytes - least < 16, "no more padding than the alignment needs"


def test_every_field_counts_in_the_descriptor() -> None:
    for field in fields(LAYOUT):
        value = getattr(LAYOUT, field.name)
        change: Any = {field.name: value + 1 if isinstance(value, int) else f"{value}2"}
        changed = replace(LAYOUT, **change)
        assert changed.descriptor() != LAYOUT.descriptor(), field.name


def test_rows_of_latents_have_no_second_part() -> None:
    """GLM-4.7-Flash in bfloat16: rows of 512 + 64 elements, instead of 20 heads with K and V of 256."""
    shape = KvShape(47, 1, 16, 576, "bfloat16", latent_dim=512)
    assert shape.block_bytes == 16 * 54_144
    assert KvShape(47, 20, 16, 256, "bfloat16").block_bytes == 16 * 962_560
    assert replace(shape, dtype="int8").num_scales == 47 * 2


def test_the_descriptor_is_canonical() -> None:
    """Block hashes in a shared index are rooted in these bytes, so a change makes all entries useless."""
    assert LAYOUT.descriptor() == (
        b'{"arithmetic":"float32-1","block_size":16,"compute_dtype":"bfloat16","dtype":"float16","head_dim":8,'
        b'"layout_version":1,"model_digest":"digest","num_kv_heads":3,"num_layers":2}'
    )
    assert json.loads(LAYOUT.descriptor())["layout_version"] == LAYOUT_VERSION


@pytest.mark.parametrize(
    ("shape", "frame_layers", "lasting", "number"),
    [
        (KvShape(36, 8, 16, 64, "bfloat16", window=128, window_layers=tuple(range(0, 36, 2))), 18, 1, 2),
        (KvShape(62, 16, 16, 128, "bfloat16", window=1024, window_layers=GEMMA_3_27B), 5, 2, 13),
        (KvShape(7, 1, 16, 16, "int8", window=24, window_layers=(0, 1, 2, 3, 4, 6)), 1, 1, 7),
    ],
)
def test_two_parts_fill_frames(shape: KvShape, frame_layers: int, lasting: int, number: int) -> None:
    """gpt-oss 120b, Gemma 3 27B, and a small one with scales."""
    assert (shape.frame.num_layers, shape.lasting_frames, shape.num_frames) == (frame_layers, lasting, number)
    assert shape.block_bytes == number * shape.frame.block_bytes <= 1.05 * shape.flat.block_bytes
    places = shape.layer_places
    assert len(set(places)) == shape.num_layers
    for layer, (frame, place) in enumerate(places):
        assert (frame < lasting) == (layer not in shape.window_layers)
        assert place < frame_layers


def test_a_long_sequence_takes_the_bytes_of_its_windows_and_full_layers() -> None:
    """At 8,192 tokens, these are 28 % of the bytes of blocks with one part (Gemma 3 27B), and 51 %."""
    gemma = KvShape(62, 16, 16, 128, "bfloat16", window=1024, window_layers=GEMMA_3_27B)
    gpt_oss = KvShape(36, 8, 16, 64, "bfloat16", window=128, window_layers=tuple(range(0, 36, 2)))
    for shape, per_token, flat in ((gemma, 140_000, 507_904), (gpt_oss, 37_584, 73_728)):
        num_whole = shape.window_blocks + 2
        held = num_whole * shape.block_bytes + (512 - num_whole) * shape.bare_bytes
        assert held / 8192 == per_token
        assert shape.flat.block_bytes / 16 == flat


def test_a_window_shows_blocks() -> None:
    shape = KvShape(2, 1, 16, 8, "float32", window=24, window_layers=(0,))
    assert [shape.first_seen_block(position) for position in (0, 22, 38, 39, 40)] == [0, 0, 0, 1, 1]
    assert shape.window_blocks == 2
    assert [shape.num_bare(number) for number in (1, 2, 3)] == [0, 0, 1]
    assert shape.payload_sizes == (2 * 2 * 16 * 8 * 4, 2 * 16 * 8 * 4, 2 * 16 * 8 * 4)
    assert shape.flat.payload_sizes == (shape.block_bytes,)
    assert shape.flat.most_tokens(10) == 160
    assert shape.most_tokens(10) == (4 + 12) * 16
