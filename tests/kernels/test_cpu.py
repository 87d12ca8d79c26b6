"""The CPU kernels against the reference, over a drawn grid, with everything unused poisoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import cpu, ops, reference
from quire.kernels.metadata import AttentionMetadata

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """One step's tensors."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_layer: torch.Tensor
    metadata: AttentionMetadata


def make_case(
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    seed: int = 0,
) -> Case:
    """Return sequences of (cached, new) tokens in shuffled blocks; all slots that no token owns hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-(cached + new) // block_size) for cached, new in lengths]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 1), 2**30, dtype=torch.int32)
    shape = (len(order), 3, 2, num_kv_heads, block_size, head_dim)
    kv_layer = torch.full(shape, float("nan"), dtype=dtype)[:, 1]
    slots: list[int] = []
    for row, (cached, new) in enumerate(lengths):
        table = [order.pop() for _ in range(num_blocks[row])]
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        all_slots = [table[p // block_size] * block_size + p % block_size for p in range(cached + new)]
        past = torch.tensor(all_slots[:cached], dtype=torch.int64)
        rows = torch.randn((2, cached, num_kv_heads, head_dim), generator=generator).to(dtype)
        reference.write_kv(rows[0], rows[1], kv_layer, past)
        slots += all_slots[cached:]
    new_tokens = [new for _, new in lengths]
    total = sum(new_tokens)
    metadata = AttentionMetadata(
        block_tables=tables,
        query_starts=torch.tensor([0, *np.cumsum(new_tokens)], dtype=torch.int32),
        seq_lens=torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )
    query = torch.randn((total, num_kv_heads * group, head_dim), generator=generator).to(dtype)
    key, value = torch.randn((2, total, num_kv_heads, head_dim), generator=generator).to(dtype)
    return Case(query, key, value, kv_layer, metadata)


def compare(case: Case, **options: object) -> None:
    expected_layer = case.kv_layer.clone()
    reference.write_kv(case.key, case.value, expected_layer, case.metadata.slot_mapping)
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)
    torch.testing.assert_close(case.kv_layer, expected_layer, rtol=0, atol=0, equal_nan=True)
    arguments = (case.query, case.kv_layer, case.metadata)
    expected = reference.paged_attention(*arguments, scale=0.2, **options)  # type: ignore[arg-type]
    actual = ops.paged_attention(*arguments, scale=0.2, **options)  # type: ignore[arg-type]
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


lengths = st.lists(
    st.tuples(st.sampled_from([0, 1, 15, 16, 17, 40, 100]), st.sampled_from([0, 1, 2, 15, 16, 17, 50])),
    min_size=1,
    max_size=6,
).map(lambda pairs: [(cached, new if cached + new else 1) for cached, new in pairs])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    lengths=lengths,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=st.sampled_from([8, 16, 32]),
    group=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([32, 48, 64]),
    window=st.sampled_from([None, 1, 7, 24]),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
)
def test_equals_the_reference(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    block_size: int,
    group: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    case = make_case(lengths, dtype=dtype, block_size=block_size, group=group, head_dim=head_dim)
    sinks = torch.linspace(-1.0, 1.0, case.query.shape[1]) if has_sinks else None
    compare(case, sliding_window=window, logit_softcap=softcap, sinks=sinks)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_use_threads", lambda work: True)
    compare(make_case([(100, 33), (5, 1), (0, 40)]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda case: case._replace(query=case.query[:, :, :16]), "head_dim must be equal"),
        (lambda case: case._replace(query=case.query[:, :3]), "heads a multiple"),
        (lambda case: case._replace(query=case.query.bfloat16()), "they must be equal"),
    ],
)
def test_wrong_shapes_are_refused(spoil: Callable[[Case], Case], message: str) -> None:
    case = spoil(make_case([(4, 2)]))
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(case.query, case.kv_layer, case.metadata, scale=1.0)


def test_wrong_keys_are_refused() -> None:
    case = make_case([(4, 2)])
    with pytest.raises(ValueError, match="key and value must be"):
        ops.write_kv(case.key[:1], case.value, case.kv_layer, case.metadata.slot_mapping)
    with pytest.raises(ValueError, match="differ in dtype"):
        ops.write_kv(case.key.bfloat16(), case.value.bfloat16(), case.kv_layer, case.metadata.slot_mapping)
