"""The Triton kernels against the reference: ``test_triton`` runs this, interpreted and on a GPU.

All memory that has not been written holds NaN: slots that no token owns, scales of unused blocks, and fresh
outputs and scratch memory, which torch fills in its deterministic mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from quire.kernels import reference
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.quantization import KV_FORMATS
from quire.kernels.triton import attention, blocks, configs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if not IS_INTERPRETED and torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = st.sampled_from([*TOLERANCE])
FORMATS = pytest.mark.parametrize("stored", [*KV_FORMATS], ids=str)
SCALE = 0.2


@pytest.fixture(autouse=True, scope="session")
def _products_of_bfloat16() -> Iterator[None]:
    """Widen bfloat16 before products: the interpreter keeps it as uint16 and would multiply the bits."""
    create_dot = InterpreterBuilder.create_dot

    def create_dot_of_floats(builder: InterpreterBuilder, a: Any, b: Any, *arguments: Any) -> Any:
        a, b = (
            builder.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in (a, b)
        )
        return create_dot(builder, a, b, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot_of_floats)
        yield


@pytest.fixture(autouse=True)
def _everything_on_the_device() -> Iterator[None]:
    with DEVICE:
        yield


class Layout(NamedTuple):
    """Sizes of blocks."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 32
    latent_dim: int | None = None
    """With latent attention: elements of a latent, which begins each row of ``head_dim`` elements."""


SMALL = Layout()


class Case(NamedTuple):
    """One step: its new tokens, and blocks in which the earlier ones are written."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_layer: torch.Tensor
    kv_scales: torch.Tensor | None
    metadata: AttentionMetadata

    @property
    def latent_dim(self) -> int | None:
        """Elements of a latent; None if blocks hold keys and values."""
        return self.value.shape[2] if self.kv_layer.shape[1] == 1 else None


Lengths = list[tuple[int, int]]


def fresh_blocks(
    num_blocks: int, layout: Layout, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return poisoned blocks, one layer of three, and their scales if they are 8-bit."""
    block_size, num_kv_heads, head_dim, latent_dim = layout
    num_parts = 2 if latent_dim is None else 1
    shape = (num_blocks, 3, num_parts, num_kv_heads, block_size, head_dim)
    if stored not in KV_FORMATS:
        return torch.full(shape, float("nan"), dtype=stored)[:, 1], None
    poison = 0x7F  # NaN in e4m3, and the largest int8.
    kv_layer = torch.full(shape, poison, dtype=torch.uint8)[:, 1].view(stored)
    return kv_layer, torch.full((num_blocks, 3, 2, num_kv_heads), float("nan"))[:, 1]


def make_case(
    lengths: Lengths,
    layout: Layout = SMALL,
    *,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    group: int = 2,
    seed: int = 0,
    spare_entries: int = 1,
) -> Case:
    """Return sequences of (cached, new) tokens in shuffled blocks; each sequence's data are its own."""
    block_size, num_kv_heads, head_dim, latent_dim = layout
    num_blocks = [-(-(cached + new) // block_size) for cached, new in lengths]
    generator = torch.Generator(DEVICE).manual_seed(seed)
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + spare_entries), 2**30, dtype=torch.int32)
    kv_layer, kv_scales = fresh_blocks(len(order), layout, stored or dtype)
    new_rows: list[torch.Tensor] = []
    slots: list[int] = []
    for row, (cached, new) in enumerate(lengths):
        generator.manual_seed(1000 * cached + new)
        shape = (cached + new, 2 * num_kv_heads + group * num_kv_heads, head_dim)
        rows = torch.randn(shape, generator=generator).to(dtype)
        table = [order.pop() for _ in range(num_blocks[row])]
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        all_slots = [table[p // block_size] * block_size + p % block_size for p in range(cached + new)]
        past = torch.tensor(all_slots[:cached], dtype=torch.int64)
        key, value = rows[:cached, :num_kv_heads], rows[:cached, num_kv_heads : 2 * num_kv_heads]
        value = value if latent_dim is None else key[..., :latent_dim]
        write_reference(key, value, kv_layer, past, kv_scales)
        new_rows.append(rows[cached:])
        slots += all_slots[cached:]
    new_tokens = [new for _, new in lengths]
    metadata = AttentionMetadata(
        block_tables=tables,
        query_starts=torch.tensor([0, *np.cumsum(new_tokens)], dtype=torch.int32),
        seq_lens=torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )
    # Views of one projection, as models make them: their strides are not those of contiguous tensors.
    key, value, query = torch.cat(new_rows).split([num_kv_heads, num_kv_heads, group * num_kv_heads], dim=1)
    value = value if latent_dim is None else key[..., :latent_dim]
    return Case(query, key, value, kv_layer, kv_scales, metadata)


def write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Write token by token, as the scales' rule has it."""
    if kv_scales is None or kv_layer.shape[1] == 1:
        reference.write_kv(key, value, kv_layer, slot_mapping, kv_scales)
        return
    kv_format = KV_FORMATS[kv_layer.dtype]
    bits = kv_layer.view(torch.uint8)
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, kv_layer.shape[3])
        vectors = torch.stack([key[token], value[token]]).float()
        if offset == 0:
            magnitude = vectors.abs().amax(-1).clamp_min(1e-12)
            kv_scales[block] = magnitude * kv_format.scale_per_magnitude
        scaled = (vectors / kv_scales[block][..., None]).clamp(-kv_format.largest, kv_format.largest)
        scaled = scaled.round() if kv_format.name == "int8" else scaled
        bits[block, :, :, offset] = scaled.to(kv_layer.dtype).view(torch.uint8)


def write(case: Case) -> Case:
    """Write the step's tokens with the kernel, check the blocks, and return the case."""
    expected = case.kv_layer.clone()
    expected_scales = None if case.kv_scales is None else case.kv_scales.clone()
    arguments = case.key, case.value
    write_reference(*arguments, expected, case.metadata.slot_mapping, expected_scales)
    blocks.write_kv(*arguments, case.kv_layer, case.metadata.slot_mapping, case.kv_scales)
    actual_bits, expected_bits = (each.contiguous().view(torch.uint8) for each in (case.kv_layer, expected))
    assert torch.equal(actual_bits, expected_bits)
    torch.testing.assert_close(case.kv_scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    return case


def attend(case: Case, **options: Any) -> torch.Tensor:
    query, *_, metadata = case
    options |= {"kv_scales": case.kv_scales, "latent_dim": case.latent_dim}
    return attention.paged_attention(query, case.kv_layer, *metadata[:3], scale=SCALE, **options)


def attend_reference(case: Case, **options: Any) -> torch.Tensor:
    kv_layer = case.kv_layer
    if case.latent_dim is not None:
        options |= {"kv_scales": case.kv_scales, "latent_dim": case.latent_dim}
    elif case.kv_scales is not None:
        kv_layer = kv_layer.double() * case.kv_scales.double()[..., None, None]
    return reference.paged_attention(case.query, kv_layer, case.metadata, scale=SCALE, **options)


def compare(case: Case, tolerance: float, **options: Any) -> None:
    launch = {name: options.pop(name) for name in ("find_config", "max_new_tokens") if name in options}
    actual, expected = attend(case, **launch, **options), attend_reference(case, **options)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def short_splits(*key: Any) -> configs.AttentionConfig:
    """Return the shipped row with small tiles, so that short sequences have many tiles and splits."""
    row = configs.find_config(*key)
    if row.kernel == "prefill":
        return replace(row, block_m=16, block_n=16)
    return replace(row, block_n=16, split_tokens=16)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "wide window": {"sliding_window": 40},
    "chunks": {"sliding_window": 24, "is_chunked": True},
    "softcap": {"logit_softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)},
    "all": {
        "sliding_window": 9,
        "logit_softcap": 5.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16, device=DEVICE),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE),
    },
}
MIXED: Lengths = [(0, 5), (37, 1), (5, 0), (3, 20), (0, 1), (16, 16)]
"""Prefill, decode and nothing at all, at and around the edges of blocks of 16."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_mixed_steps_equal_the_reference(dtype: torch.dtype, name: str) -> None:
    compare(write(make_case(MIXED, dtype=dtype)), TOLERANCE[dtype], **FEATURES[name])


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_many_tiles_and_splits_equal_the_reference(features: dict[str, Any]) -> None:
    case = write(make_case([(0, 21), (37, 1), (3, 0), (16, 16), (200, 1)]))
    compare(case, 1e-5, find_config=short_splits, **features)


@FORMATS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_8_bit_blocks_equal_the_reference(stored: torch.dtype, dtype: torch.dtype, name: str) -> None:
    # The weights of float16 queries are multiplied with values in bfloat16.
    tolerance = 2e-2 if dtype == torch.float16 else TOLERANCE[dtype]
    lengths = [(0, 5), (37, 1), (3, 20), (0, 1)]
    compare(write(make_case(lengths, dtype=dtype, stored=stored)), tolerance, **FEATURES[name])


LATENTS = Layout(16, 1, 48, 32)


@pytest.mark.parametrize(
    ("layout", "num_heads", "dtype"),
    [
        (LATENTS, 4, torch.float16),
        (LATENTS, 18, torch.float32),
        (Layout(8, 1, 60, 40), 6, torch.float32),
        (Layout(16, 1, 576, 512), 16, torch.bfloat16),
    ],
    ids=["small", "parts of 9 heads", "odd sizes", "DeepSeek-V3's sizes"],
)
def test_latents_equal_the_reference(layout: Layout, num_heads: int, dtype: torch.dtype) -> None:
    case = write(make_case([(0, 5), (37, 1), (5, 0), (3, 12), (0, 1)], layout, dtype=dtype, group=num_heads))
    compare(case, TOLERANCE[dtype], find_config=short_splits)
    assert attend(case).shape[2] == layout.latent_dim


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_latents_of_8_bits_equal_the_reference(stored: torch.dtype, dtype: torch.dtype) -> None:
    tolerance = 2e-2 if dtype == torch.float16 else TOLERANCE[dtype]
    case = make_case([(37, 1), (3, 12)], LATENTS, dtype=dtype, stored=stored, group=4)
    compare(write(case), tolerance, find_config=short_splits)


@pytest.mark.parametrize("name", ["window", "all"])
def test_latents_with_other_features_equal_the_reference(name: str) -> None:
    case = write(make_case([(0, 21), (37, 1), (70, 1)], LATENTS, group=4))
    compare(case, 1e-5, find_config=short_splits, **FEATURES[name])


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Case, dict[str, Any], float]:
    block_size = draw(st.sampled_from([8, 16, 32, 128]))
    layout = Layout(
        block_size, draw(st.integers(1, 2)), draw(st.sampled_from([16, 32, 64, 80, 96, 128, 256]))
    )
    edges = st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size])
    sequence = st.tuples(
        st.one_of(edges, st.integers(0, 70)), st.one_of(st.just(1), edges, st.integers(0, 20))
    )
    lengths = draw(st.lists(sequence, min_size=1, max_size=3))
    dtype = draw(DTYPES)
    stored = draw(st.sampled_from([dtype, dtype, *KV_FORMATS]))
    group = draw(st.sampled_from([1, 2, 3, 8, 17]))
    num_heads = layout.num_kv_heads * group
    options: dict[str, Any] = {
        "sliding_window": draw(st.none() | st.integers(1, 40)),
        "is_chunked": draw(st.booleans()),
        "logit_softcap": draw(st.none() | st.just(4.0)),
        "sinks": draw(st.none() | st.just(torch.linspace(-2, 2, num_heads))),
        "alibi_slopes": draw(st.none() | st.just(torch.linspace(1, 0.1, num_heads))),
    }
    if draw(st.booleans()):
        options["find_config"] = short_splits
    case = make_case(lengths, layout, dtype=dtype, stored=stored, group=group, seed=draw(st.integers(0, 9)))
    tolerance = 2e-2 if stored != dtype and dtype == torch.float16 else TOLERANCE[dtype]
    return case, options, tolerance


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(drawn_cases())
def test_drawn_steps_equal_the_reference(drawn: tuple[Case, dict[str, Any], float]) -> None:
    case, options, tolerance = drawn
    compare(write(case), tolerance, **options)


def test_a_decode_step_needs_no_launch_for_prefill() -> None:
    compare(write(make_case([(40, 1), (5, 1)])), 1e-5, max_new_tokens=1)


def test_a_step_may_be_padded() -> None:
    case = write(make_case([(40, 1), (5, 3)]))
    starts, lengths = (torch.nn.functional.pad(each, (0, 2), value=4) for each in case.metadata[1:3])
    tables = torch.nn.functional.pad(case.metadata.block_tables, (0, 0, 0, 2), value=2**30)
    metadata = AttentionMetadata(tables, starts, lengths, case.metadata.slot_mapping)
    padded = case._replace(query=torch.nn.functional.pad(case.query, (0, 0, 0, 0, 0, 4)), metadata=metadata)
    assert torch.equal(attend(padded)[:4], attend(case))


def test_an_empty_step_has_an_empty_output() -> None:
    case = make_case([(5, 0), (0, 0)])
    blocks.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)
    assert attend(case).shape == (0, 4, 32)


@pytest.mark.parametrize("sliding_window", [None, 50])
def test_a_decoded_token_does_not_depend_on_its_batch(sliding_window: int | None) -> None:
    options = {"sliding_window": sliding_window, "find_config": short_splits}
    single = attend(write(make_case([(250, 1)])), **options)
    among = write(make_case([(3, 1), (250, 1), (900, 1), (0, 9)], spare_entries=5, seed=3))
    assert torch.equal(attend(among, **options)[1:2], single)


def test_a_prefilled_token_does_not_depend_on_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dot_by_rows(_: InterpreterBuilder, a: Any, b: Any, d: Any, *__: Any) -> TensorHandle:
        # BLAS, unlike tensor cores, adds up a row in an order that depends on where the row is.
        return TensorHandle(np.stack([row @ b.data for row in a.data]) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot_by_rows)
    whole = attend(write(make_case([(0, 70)])))
    case = make_case([(0, 70)])
    write(case)
    chunks = []
    for first, last in ((0, 3), (3, 21), (21, 70)):
        metadata = case.metadata._replace(
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
        )
        chunks.append(attend(case._replace(query=case.query[first:last], metadata=metadata)))
    assert torch.equal(torch.cat(chunks), whole)


@FORMATS
@pytest.mark.parametrize("cuts", [[], [1], [16, 17], [5, 15, 31, 32], [*range(1, 40)]], ids=str)
def test_8_bit_blocks_do_not_depend_on_the_chunks(stored: torch.dtype, cuts: list[int]) -> None:
    case = make_case([(0, 40)], dtype=torch.bfloat16, stored=stored)
    whole = write(make_case([(0, 40)], dtype=torch.bfloat16, stored=stored))
    for first, last in zip([0, *cuts], [*cuts, 40], strict=True):
        blocks.write_kv(
            case.key[first:last],
            case.value[first:last],
            case.kv_layer,
            case.metadata.slot_mapping[first:last],
            case.kv_scales,
        )
    assert torch.equal(case.kv_layer.view(torch.uint8), whole.kv_layer.view(torch.uint8))
    torch.testing.assert_close(case.kv_scales, whole.kv_scales, rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_8_bit_values_come_back_within_their_step(stored: torch.dtype) -> None:
    case = write(make_case([(0, 48)], stored=stored, layout=Layout(head_dim=128)))
    assert case.kv_scales is not None
    back = case.kv_layer.float() * case.kv_scales[..., None, None]
    block, offset = case.metadata.slot_mapping // 16, case.metadata.slot_mapping % 16
    for part, written in enumerate((case.key, case.value)):
        error = (back[block, part, :, offset] - written).norm() / written.norm()
        assert error < 0.03


@FORMATS
def test_8_bit_values_saturate(stored: torch.dtype) -> None:
    kv_layer, kv_scales = fresh_blocks(1, Layout(num_kv_heads=1), stored)
    key = torch.ones(2, 1, 32)
    key[1] = 1e9
    slots = torch.tensor([0, 1])
    blocks.write_kv(key, -key, kv_layer, slots, kv_scales)
    assert kv_scales is not None
    largest = KV_FORMATS[stored].largest
    assert kv_layer[0, :, 0, 1].float().unique().tolist() == [-largest, largest]


def test_slots_below_zero_are_skipped() -> None:
    case = make_case([(0, 2)])
    before = case.kv_layer.clone()
    blocks.write_kv(case.key, case.value, case.kv_layer, torch.tensor([-1, -1]))
    torch.testing.assert_close(case.kv_layer, before, rtol=0, atol=0, equal_nan=True)


def test_offsets_pass_32_bits() -> None:
    stride = 2**30
    memory = torch.from_numpy(np.zeros(2 * stride + 2 * 8 * 32, dtype=np.int8)).to(DEVICE)
    kv_layer = memory.as_strided((3, 2, 1, 8, 32), (stride, 8 * 32, 8 * 32, 32, 1))
    kv_scales = torch.full((3, 2, 1), float("nan"))
    key, value = torch.randn(2, 5, 1, 32)
    slots = 2 * 8 + torch.arange(5)
    blocks.write_kv(key, value, kv_layer, slots, kv_scales)
    integers = partial(torch.tensor, dtype=torch.int32)
    metadata = AttentionMetadata(integers([[2]]), integers([0, 5]), integers([5]), slots)
    near = Case(key, key, value, kv_layer[2:].clone(), kv_scales[2:], metadata)
    near = near._replace(metadata=metadata._replace(block_tables=integers([[0]])))
    assert near.kv_layer.any()
    assert torch.equal(
        attend(near._replace(kv_layer=kv_layer, kv_scales=kv_scales, metadata=metadata)), attend(near)
    )


IDS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(2, 2, 1, 8, 4), (5000,)], ids=str)


@IDS
@SHAPES
def test_blocks_are_copied(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = torch.randn(9, *shape)
    expected = memory.clone()
    expected[[7, 0]] = memory[[2, 5]]
    blocks.copy_blocks(memory, torch.tensor([[2, 7], [5, 0]], dtype=dtype))
    assert torch.equal(memory, expected)
    blocks.copy_blocks(memory, torch.empty((0, 2), dtype=dtype))
    assert torch.equal(memory, expected)


@IDS
@SHAPES
def test_blocks_are_gathered_and_scattered(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = torch.randn(9, *shape)
    ids = torch.tensor([8, 3, 3, 0], dtype=dtype)
    out = torch.full((4, *shape), float("nan"))
    blocks.gather_blocks(memory, ids, out)
    assert torch.equal(out, memory[ids.long()])
    expected = memory.clone()
    expected[[1, 4]] = out[:2]
    blocks.scatter_blocks(out[:2], torch.tensor([1, 4], dtype=dtype), memory)
    assert torch.equal(memory, expected)


def test_blocks_of_bytes_may_lie_apart() -> None:
    memory = torch.randint(0, 256, (5, 96), dtype=torch.uint8)
    expected = memory.clone()
    expected[4, :48] = memory[0, :48]
    blocks.copy_blocks(memory[:, :48], torch.tensor([[0, 4]]))
    assert torch.equal(memory, expected)


ROWS = torch.zeros(3, 32, device=DEVICE)
REFUSED: dict[str, tuple[Callable[[Case], object], str]] = {
    "blocks of another shape": (
        lambda case: attend(case._replace(kv_layer=case.kv_layer[0])),
        "kv_layer: expected the shape",
    ),
    "blocks of another dtype": (
        lambda case: attend(case._replace(kv_layer=case.kv_layer.double())),
        "kv_layer: expected .* got torch.float64",
    ),
    "vectors that are not dense": (
        lambda case: attend(case._replace(kv_layer=case.kv_layer.mT.contiguous().mT)),
        "kv_layer: expected a last dimension of stride 1",
    ),
    "8 bits without scales": (
        lambda case: attend(case._replace(kv_layer=case.kv_layer.nan_to_num().to(torch.int8))),
        "kv_scales: expected float32 scales",
    ),
    "scales without 8 bits": (
        lambda case: attend(case._replace(kv_scales=torch.ones(3, 2, 2))),
        "kv_scales: expected None",
    ),
    "a query of another dtype": (
        lambda case: attend(case._replace(query=case.query.half())),
        "query: expected torch.float32, got torch.float16",
    ),
    "a query of another head_dim": (
        lambda case: attend(case._replace(query=case.query[..., :16])),
        r"query: expected the shape \[num_tokens, num_heads, 32\], got \[5, 4, 16\]",
    ),
    "heads without a KV head": (
        lambda case: attend(case._replace(query=case.query[:, :3])),
        "groups of 2 KV heads, got 3",
    ),
    "wide block ids": (
        lambda case: attend(
            case._replace(metadata=case.metadata._replace(block_tables=case.metadata.block_tables.long()))
        ),
        "block_tables: expected torch.int32, got torch.int64",
    ),
    "a sink too few": (
        lambda case: attend(case, sinks=torch.zeros(3)),
        r"sinks: expected the shape \[4\], got \[3\]",
    ),
    "slots too few": (
        lambda case: blocks.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping[:2]),
        r"key: expected the shape \[2, 2, 32\], got \[5, 2, 32\]",
    ),
    "triples": (
        lambda case: blocks.copy_blocks(ROWS, torch.zeros(1, 3, dtype=torch.int64)),
        r"pairs: expected the shape \[1, 2\], got \[1, 3\]",
    ),
    "ids that are floats": (
        lambda case: blocks.gather_blocks(ROWS, torch.zeros(1), ROWS[:1]),
        "ids: expected torch.int32 or torch.int64, got torch.float32",
    ),
    "staging of another length": (
        lambda case: blocks.scatter_blocks(ROWS[:2], torch.tensor([0]), ROWS),
        r"staging: expected the shape \[1, 32\], got \[2, 32\]",
    ),
    "blocks of odd bytes": (
        lambda case: blocks.copy_blocks(ROWS[:, :3], torch.tensor([[0, 1]])),
        "multiple of 16 bytes, aligned to it, got 12",
    ),
    "blocks with gaps": (
        lambda case: blocks.copy_blocks(ROWS[:, ::2], torch.tensor([[0, 1]])),
        "contiguous blocks",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[Case], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(make_case([(0, 5)]))
