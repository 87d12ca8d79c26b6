"""Layouts: their size, their wire form, and what is said when two differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import LayoutMismatchError
from quire.kvtransfer.layout import layout_from_proto, layout_to_proto, require_equal

LAYOUT = KvLayout(
    num_layers=80,
    num_kv_heads=8,
    block_size=16,
    head_dim=128,
    dtype="bfloat16",
    model_digest="a",
    compute_dtype="bfloat16",
    arithmetic="float32-1",
)


def test_a_block_of_a_70b_model_has_5_mib() -> None:
    assert LAYOUT.block_bytes == 5 << 20


def test_the_wire_form_keeps_every_field() -> None:
    assert layout_from_proto(layout_to_proto(LAYOUT)) == LAYOUT


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("num_layers", 32),
        ("num_kv_heads", 4),
        ("block_size", 32),
        ("head_dim", 64),
        ("dtype", "float16"),
        ("model_digest", "b"),
        ("compute_dtype", "float32"),
        ("arithmetic", "amx-bf16-1"),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(field: str, theirs: Any) -> None:
    ours = getattr(LAYOUT, field)
    with pytest.raises(LayoutMismatchError, match=f"^{field} is {ours} here and {theirs} there:"):
        require_equal(LAYOUT, replace(LAYOUT, **{field: theirs}))


def test_a_mismatch_names_all_fields() -> None:
    with pytest.raises(LayoutMismatchError, match=r"block_size is .*; dtype is "):
        require_equal(LAYOUT, replace(LAYOUT, block_size=8, dtype="float32"))


def test_equal_layouts_pass() -> None:
    require_equal(LAYOUT, replace(LAYOUT))
