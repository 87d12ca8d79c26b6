"""The layout of a block: the sizes of its parts, and what its descriptor tells apart."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.kvindex.kv_layout import LAYOUT_VERSION, KvLayout, KvShape

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
LAYOUT = KvLayout(2, 3, 16, 8, "float16", "digest", "bfloat16", "float32-1")
sizes = st.integers(1, 9)
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
