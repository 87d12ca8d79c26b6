"""The CPU kernels against the reference, over a drawn grid, with everything unused poisoned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import ops, reference
from quire.kernels.cpu import attention, attention_pairs, attention_tiles
from quire.kernels.cpu.products.amx_product import AMX_BFLOAT16, FLOAT32
from quire.kernels.cpu.products.bfloat16_product import prefers_pair_products
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.quantization import KV_FORMATS
from tests.testing.attention_cases import Case, make_case

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def compare(case: Case, **options: object) -> None:
    expected_layer = case.kv_layer.clone()
    expected_scales = None if case.kv_scales is None else case.kv_scales.clone()
    reference.write_kv(case.key, case.value, expected_layer, case.metadata.slot_mapping, expected_scales)
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping, case.kv_scales)
    torch.testing.assert_close(case.kv_layer.float(), expected_layer.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(case.kv_scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    arguments = (case.query, case.kv_layer, case.metadata)
    options |= {"scale": 0.2, "kv_scales": case.kv_scales, "latent_dim": case.latent_dim}
    expected = reference.paged_attention(*arguments, **options)  # type: ignore[arg-type]
    tolerance = TOLERANCE[case.query.dtype]
    for arithmetic in (FLOAT32, AMX_BFLOAT16):
        actual = ops.paged_attention(*arguments, **options, arithmetic=arithmetic)  # type: ignore[arg-type]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


lengths = st.lists(
    st.tuples(st.sampled_from([0, 1, 15, 16, 17, 40, 100]), st.sampled_from([0, 1, 2, 15, 16, 17, 50])),
    min_size=1,
    max_size=6,
).map(lambda pairs: [(cached, new if cached + new else 1) for cached, new in pairs])


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    dtype: torch.dtype
    block_size: int
    group: int
    head_dim: int
    stored: torch.dtype | None = None
    latent_dim: int | None = None
    num_kv_heads: int = 2


shapes = st.sampled_from(
    [
        Shape(torch.float32, 16, 2, 32),
        Shape(torch.float32, 8, 1, 20),
        Shape(torch.float32, 24, 3, 80),
        Shape(torch.bfloat16, 16, 4, 48),
        Shape(torch.bfloat16, 32, 1, 64),
        Shape(torch.bfloat16, 16, 3, 128),
        Shape(torch.float16, 128, 7, 32),
        Shape(torch.bfloat16, 16, 2, 32, torch.int8),
        Shape(torch.bfloat16, 16, 2, 32, torch.float8_e4m3fn),
        Shape(torch.float32, 16, 20, 80, None, 64, 1),
        Shape(torch.bfloat16, 16, 20, 80, None, 64, 1),
        Shape(torch.float32, 24, 34, 28, torch.int8, 20, 1),
        Shape(torch.bfloat16, 16, 20, 80, torch.float8_e4m3fn, 64, 1),
    ]
)


@settings(max_examples=100)
@given(
    lengths=lengths,
    shape=shapes,
    window=st.sampled_from([None, 1, 7, 24]),
    is_chunked=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
    has_slopes=st.booleans(),
)
def test_equals_the_reference(
    lengths: list[tuple[int, int]],
    shape: Shape,
    window: int | None,
    is_chunked: bool,
    softcap: float | None,
    has_sinks: bool,
    has_slopes: bool,
) -> None:
    case = make_case(lengths, **shape._asdict())
    num_heads = case.query.shape[1]
    sinks = torch.linspace(-1.0, 1.0, num_heads) if has_sinks else None
    slopes = torch.linspace(0.0, 0.5, num_heads) if has_slopes else None
    windows = {"sliding_window": window, "is_chunked": is_chunked}
    compare(case, **windows, logit_softcap=softcap, sinks=sinks, alibi_slopes=slopes)


def test_blocks_of_one_token() -> None:
    compare(make_case([(40, 3), (0, 5), (17, 1)], block_size=1))


def test_large_scores_do_not_overflow() -> None:
    case = make_case([(100, 3), (3, 40)])
    compare(case._replace(query=case.query * 1000), logit_softcap=None)
    compare(case._replace(query=case.query * 1000), logit_softcap=30.0)


@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [(torch.float32, FLOAT32), (torch.bfloat16, AMX_BFLOAT16)], ids=str
)
def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, arithmetic: str) -> None:
    case = make_case([(100, 33), (5, 1), (0, 400)], dtype=dtype)
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)
    options: dict[str, Any] = {"scale": 0.2, "arithmetic": arithmetic}
    one_thread = ops.paged_attention(case.query, case.kv_layer, case.metadata, **options)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    three_threads = ops.paged_attention(case.query, case.kv_layer, case.metadata, **options)
    assert torch.equal(one_thread, three_threads)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}, {"logit_softcap": 3.0}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "stored", "arithmetic"),
    [
        (torch.float32, None, FLOAT32),
        (torch.bfloat16, None, FLOAT32),
        (torch.bfloat16, torch.int8, FLOAT32),
        (torch.bfloat16, None, AMX_BFLOAT16),
    ],
    ids=str,
)
def test_sequences_that_share_blocks_have_the_same_bits_as_in_a_batch_of_one(
    dtype: torch.dtype,
    stored: torch.dtype | None,
    options: dict[str, float],
    num_threads: int,
    arithmetic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    lengths = [(160, 1), (160, 1), (64, 1), (100, 1), (159, 40), (3, 1), (128, 1), (500, 2), (191, 1)] * 3
    for num_shared_blocks in (3, 4, 8, 10):
        case = make_case(lengths, dtype=dtype, stored=stored, num_shared_blocks=num_shared_blocks)
        ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping, case.kv_scales)
        batch = ops.paged_attention(
            case.query,
            case.kv_layer,
            case.metadata,
            scale=0.2,
            kv_scales=case.kv_scales,
            arithmetic=arithmetic,
            **options,  # type: ignore[arg-type]
        )
        starts = case.metadata.query_starts.tolist()
        for row, (first, last) in enumerate(itertools.pairwise(starts)):
            alone = AttentionMetadata(
                case.metadata.block_tables[row : row + 1],
                torch.tensor([0, last - first], dtype=torch.int32),
                case.metadata.seq_lens[row : row + 1],
                case.metadata.slot_mapping[first:last],
            )
            single = ops.paged_attention(
                case.query[first:last],
                case.kv_layer,
                alone,
                scale=0.2,
                kv_scales=case.kv_scales,
                arithmetic=arithmetic,
                **options,  # type: ignore[arg-type]
            )
            assert torch.equal(single, batch[first:last])


@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [(torch.float32, FLOAT32), (torch.bfloat16, AMX_BFLOAT16)], ids=str
)
@pytest.mark.parametrize("spoiled", ["key", "value"])
def test_a_sequence_with_nan_does_not_spoil_another(
    spoiled: str, dtype: torch.dtype, arithmetic: str
) -> None:
    case = make_case([(0, 40), (0, 20)], dtype=dtype)
    getattr(case, spoiled)[38] = float("nan")
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)
    output = ops.paged_attention(case.query, case.kv_layer, case.metadata, scale=0.2, arithmetic=arithmetic)
    assert output[38:40].isnan().all()
    assert output[40:].isfinite().all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda case: case._replace(query=case.query[:, :, :16]), "head_dim must be equal"),
        (lambda case: case._replace(query=case.query[:, :3]), "heads a multiple"),
        (lambda case: case._replace(query=case.query.bfloat16()), "they must be equal"),
        (lambda case: case._replace(kv_layer=case.kv_layer.to(torch.int8)), "have scales of shape"),
        (lambda case: case._replace(kv_layer=case.kv_layer.double()), "there are kernels for"),
        (lambda case: case._replace(kv_layer=case.kv_layer.transpose(2, 3)), "must be contiguous"),
    ],
)
def test_wrong_shapes_are_refused(spoil: Callable[[Case], Case], message: str) -> None:
    case = spoil(make_case([(4, 2)]))
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(case.query, case.kv_layer, case.metadata, scale=1.0)


def test_rows_of_latents_need_the_size_of_a_latent() -> None:
    case = make_case([(4, 2)], num_kv_heads=1, head_dim=48, latent_dim=32)
    with pytest.raises(ValueError, match="latent_dim is missing"):
        ops.paged_attention(case.query, case.kv_layer, case.metadata, scale=1.0)
    heads = make_case([(4, 2)])
    with pytest.raises(ValueError, match="rows of latents have one part and one head"):
        ops.paged_attention(heads.query, heads.kv_layer, heads.metadata, scale=1.0, latent_dim=16)


def test_wrong_keys_are_refused() -> None:
    case = make_case([(4, 2)])
    with pytest.raises(ValueError, match="key and value must be"):
        ops.write_kv(case.key[:1], case.value, case.kv_layer, case.metadata.slot_mapping)
    with pytest.raises(ValueError, match="they must be equal"):
        ops.write_kv(case.key.bfloat16(), case.value.bfloat16(), case.kv_layer, case.metadata.slot_mapping)


@pytest.mark.parametrize("shape", [{}, {"num_kv_heads": 1, "latent_dim": 24}], ids=["heads", "latents"])
@pytest.mark.parametrize("stored", [*KV_FORMATS], ids=str)
def test_bytes_of_a_quantized_block_do_not_depend_on_the_steps_that_wrote_it(
    stored: torch.dtype, shape: dict[str, Any]
) -> None:
    at_once = make_case([(0, 40)], stored=stored, **shape)
    assert at_once.kv_scales is not None
    in_steps = at_once._replace(kv_layer=at_once.kv_layer.clone(), kv_scales=at_once.kv_scales.clone())
    slots = at_once.metadata.slot_mapping
    ops.write_kv(at_once.key, at_once.value, at_once.kv_layer, slots, at_once.kv_scales)
    for part in (slice(0, 1), slice(1, 20), slice(20, 40)):
        ops.write_kv(
            in_steps.key[part], in_steps.value[part], in_steps.kv_layer, slots[part], in_steps.kv_scales
        )
    assert torch.equal(at_once.kv_layer.view(torch.uint8), in_steps.kv_layer.view(torch.uint8))
    assert in_steps.kv_scales is not None
    assert torch.equal(at_once.kv_scales.nan_to_num(), in_steps.kv_scales.nan_to_num())


def test_every_stored_e4m3_value_is_read_and_written_exactly() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    finite = bits[(bits & 0x7F) != 0x7F]
    values = finite.view(torch.float8_e4m3fn).float()
    # Slot 0 sets a scale of one.
    scale = KV_FORMATS[torch.float8_e4m3fn].scale_per_magnitude
    rows = torch.cat([torch.full((1, 1, 254), 1 / scale), values.view(1, 1, 254)])
    layer = torch.zeros((1, 2, 1, 2, 254), dtype=torch.float8_e4m3fn)
    scales = torch.zeros((1, 2, 1))
    ops.write_kv(rows, rows, layer, torch.arange(2), scales)
    assert torch.equal(layer[0, 0, 0, 1].float(), values)
    metadata = AttentionMetadata(
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        slot_mapping=torch.tensor([1]),
    )
    # With ALiBi's slope, all of the weight lies on the last token: its value comes out.
    output = ops.paged_attention(
        torch.zeros((1, 1, 254)),
        layer,
        metadata,
        scale=1.0,
        alibi_slopes=torch.tensor([1e4]),
        kv_scales=scales,
    )
    torch.testing.assert_close(output[0, 0], values, rtol=0, atol=1e-30)


def test_slopes_and_sinks_may_have_strides() -> None:
    case = make_case([(20, 20), (37, 1)])
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)
    values = torch.linspace(0.1, 1.0, 2 * case.query.shape[1])
    strided, dense = values[::2], values[::2].contiguous()
    outputs = [
        ops.paged_attention(
            case.query, case.kv_layer, case.metadata, scale=0.2, alibi_slopes=slopes, sinks=sinks
        )
        for slopes, sinks in ((strided, dense), (dense, strided), (dense, dense))
    ]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[2])


def test_slots_below_zero_are_not_written_and_empty_sequences_are_skipped() -> None:
    """So that a batch can be padded to a fixed size."""
    case = make_case([(20, 1), (5, 1)])
    untouched = case.kv_layer.clone()
    slots = case.metadata.slot_mapping.clone()
    slots[:] = -1
    ops.write_kv(case.key, case.value, case.kv_layer, slots)
    assert torch.equal(case.kv_layer.nan_to_num(), untouched.nan_to_num())
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)
    expected = ops.paged_attention(case.query, case.kv_layer, case.metadata, scale=0.2)
    padded = AttentionMetadata(
        block_tables=torch.cat([case.metadata.block_tables, torch.zeros_like(case.metadata.block_tables)]),
        query_starts=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        seq_lens=torch.cat([case.metadata.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        slot_mapping=torch.cat([case.metadata.slot_mapping, torch.full((2,), -1)]),
        max_new_tokens=1,
    )
    query = torch.cat([case.query, torch.full_like(case.query, float("nan"))])
    actual = ops.paged_attention(query, case.kv_layer, padded, scale=0.2)
    assert torch.equal(actual[:2], expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_blocks_are_copied_gathered_and_scattered(dtype: torch.dtype) -> None:
    blocks = torch.arange(6 * 32).view(6, 32).to(dtype)
    before = blocks.clone()
    ops.copy_blocks(blocks, torch.tensor([[0, 4], [2, 1]]))
    assert torch.equal(blocks, before[[0, 2, 2, 3, 0, 5]])
    staging = torch.empty((2, 32), dtype=dtype)
    ops.gather_blocks(blocks, torch.tensor([5, 0]), staging)
    assert torch.equal(staging, before[[5, 0]])
    ops.scatter_blocks(staging, torch.tensor([3, 2]), blocks)
    assert torch.equal(blocks, before[[0, 2, 0, 5, 0, 5]])


LATENTS = {"num_kv_heads": 1, "group": 20, "head_dim": 80, "latent_dim": 64}


@pytest.mark.parametrize("shape", [{}, {"head_dim": 128}, LATENTS], ids=["heads", "wide", "latents"])
@pytest.mark.parametrize(
    ("dtype", "stored", "arithmetic"),
    [
        *((each, None, FLOAT32) for each in TOLERANCE),
        (torch.bfloat16, torch.int8, FLOAT32),
        (torch.bfloat16, None, AMX_BFLOAT16),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 11}, {"logit_softcap": 3.0}], ids=str)
def test_a_token_has_the_same_bits_however_its_sequence_is_cut(
    options: dict[str, Any],
    dtype: torch.dtype,
    stored: torch.dtype | None,
    shape: dict[str, Any],
    arithmetic: str,
) -> None:
    """As a prompt, in chunks, among drafts to verify, or one by one: over every edge of blocks and spans."""
    for cached, num_new in ((3, 5), (60, 8), (0, 150), (130, 40)):
        case = make_case([(cached, num_new)], dtype=dtype, stored=stored, seed=cached, **shape)
        ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping, case.kv_scales)

        def attend(first: int, last: int, case: Case = case, cached: int = cached) -> torch.Tensor:
            chunk = case.metadata._replace(
                query_starts=torch.tensor([0, last - first], dtype=torch.int32),
                seq_lens=torch.tensor([cached + last], dtype=torch.int32),
            )
            return ops.paged_attention(
                case.query[first:last],
                case.kv_layer,
                chunk,
                scale=0.2,
                kv_scales=case.kv_scales,
                latent_dim=case.latent_dim,
                arithmetic=arithmetic,
                **options,
            )

        together = attend(0, num_new)
        for size in (1, 2, 5, 37):
            cuts = range(0, num_new, size)
            pieces = torch.cat([attend(first, min(first + size, num_new)) for first in cuts])
            assert torch.equal(pieces, together), (cached, size)


@pytest.mark.skipif(not prefers_pair_products(), reason="vdpbf16ps is not the fastest way here")
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_of_pairs_have_the_bits_of_float32(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, block_size: int
) -> None:
    case = make_case([(0, 150), (131, 41)], dtype=torch.bfloat16, head_dim=head_dim, block_size=block_size)
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)

    def attend() -> torch.Tensor:
        attention.kernel_for.cache_clear()
        return ops.paged_attention(case.query, case.kv_layer, case.metadata, scale=0.3)

    by_pairs = attend()
    monkeypatch.setattr(attention_pairs, "prefers_pair_products", lambda: False)
    in_float32 = attend()
    monkeypatch.undo()
    attention.kernel_for.cache_clear()
    assert torch.equal(by_pairs, in_float32)


def test_smaller_parts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of wide latents, of which fewer rows fit into a core's cache."""
    case = make_case([(0, 150), (70, 40)], num_kv_heads=1, group=20, head_dim=80, latent_dim=64)
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping, case.kv_scales)

    def attend() -> torch.Tensor:
        return ops.paged_attention(
            case.query, case.kv_layer, case.metadata, scale=0.2, latent_dim=case.latent_dim
        )

    expected = attend()
    monkeypatch.setattr(attention_tiles, "_MAX_ELEMENTS", 1)
    attention.kernel_for.cache_clear()
    assert torch.equal(attend(), expected)
    attention.kernel_for.cache_clear()
