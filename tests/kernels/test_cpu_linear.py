"""Packed linear layers on the CPU: right sums, in one order for any number of rows and threads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.intrinsics import TILE_COLUMNS, processor_features
from quire.kernels.cpu.products import packing
from quire.kernels.cpu.products.linear import linear, sums
from quire.kernels.cpu.products.packed_weight import UNIT, PackedWeight, PairedWeight, in_own_memory
from quire.kernels.cpu.products.packing import pack
from quire.kernels.cpu.products.unit_product import ROWS, num_segments_of
from tests.testing.linear_layers import check_product, check_rows_and_threads, in_pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_layer(
    dtype: torch.dtype, out_features: int, in_features: int, seed: int
) -> tuple[torch.Tensor, PackedWeight, torch.Tensor]:
    """Return a weight, the same one packed, and its padded bias."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((out_features, in_features), generator=generator).to(dtype)
    packed = pack(weight)
    bias = torch.zeros(packed.num_units * UNIT)
    bias[:out_features] = torch.randn(out_features, generator=generator)
    return weight, packed, bias


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    out_features=st.integers(1, 200),
    in_features=st.integers(1, 600),
    num_rows=st.integers(1, 2 * ROWS + 1),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_multiplies(
    dtype: torch.dtype, out_features: int, in_features: int, num_rows: int, has_bias: bool, seed: int
) -> None:
    weight, packed, bias = random_layer(dtype, out_features, in_features, seed)
    inputs = torch.randn((num_rows, in_features), generator=torch.Generator().manual_seed(seed)).to(dtype)

    given_bias = bias if has_bias else None
    check_product(linear(inputs, packed, given_bias), inputs, weight, given_bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (320, 96), (192, 1024)])
def test_bits_do_not_depend_on_other_rows_or_on_threads(
    dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    _, packed, bias = random_layer(dtype, out_features, in_features, seed=2)
    check_rows_and_threads(lambda inputs: linear(inputs, packed, bias), in_features, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_loses_nothing(dtype: torch.dtype) -> None:
    weight, packed, _ = random_layer(dtype, 130, 77, seed=4)
    rows = torch.tensor([[0, 129], [64, 3]])
    assert torch.equal(packed.unpack(), weight)
    assert torch.equal(packed.rows(rows), weight[rows])


def test_the_padding_does_not_reach_the_output() -> None:
    weight, packed, bias = random_layer(torch.float32, 70, 33, seed=5)
    inputs = torch.ones((7, 33))
    expected = linear(inputs, packed, bias)
    packed.panels.view(-1)[weight.numel() :].masked_fill_(
        packed.panels.view(-1)[weight.numel() :] == 0, torch.nan
    )
    bias[70:] = torch.nan
    assert torch.equal(linear(inputs, packed, bias), expected)


def test_leading_dimensions_are_kept() -> None:
    weight, packed, _ = random_layer(torch.float32, 64, 32, seed=6)
    inputs = torch.ones((2, 3, 32))
    assert linear(inputs, packed, None).shape == (2, 3, 64)
    assert linear(inputs[:, :0], packed, None).shape == (2, 0, 64)
    assert torch.allclose(linear(inputs, packed, None), inputs @ weight.T, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7, ROWS + 5])
def test_segments_are_summed_in_a_binary_tree(dtype: torch.dtype, num_rows: int) -> None:
    weight, packed, bias = random_layer(dtype, 130, 256, seed=7)
    inputs = torch.randn((num_rows, 256), generator=torch.Generator().manual_seed(8)).to(dtype)
    parts = [
        sums(inputs[:, first : first + 32].contiguous(), pack(weight[:, first : first + 32]), None)
        for first in range(0, 256, 32)
    ]
    expected = (in_pairs(parts) + bias)[:, :130].to(dtype)
    assert torch.equal(linear(inputs, packed, bias, num_segments=8), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_partial_sums_of_ranks_add_up_to_the_same_bits(dtype: torch.dtype, num_ranks: int) -> None:
    weight, packed, _ = random_layer(dtype, 70, 512, seed=9)
    inputs = torch.randn((5, 512), generator=torch.Generator().manual_seed(10)).to(dtype)
    size = 512 // num_ranks
    parts = [
        sums(inputs[:, first : first + size], pack(weight[:, first : first + size]), None, 8 // num_ranks)
        for first in range(0, 512, size)
    ]
    assert torch.equal(in_pairs(parts), sums(inputs, packed, None, 8))


@pytest.mark.parametrize(
    ("in_features", "num_parts", "expected"),
    [(576, 9, 1), (2048, 32, 8), (896, 14, 2), (96, 96, 1), (1536, 1536, 8), (29568, 29568, 4)],
)
def test_segments_end_between_parts_and_groups(in_features: int, num_parts: int, expected: int) -> None:
    assert num_segments_of(in_features, num_parts) == expected


@pytest.mark.skipif(not processor_features().get("avx512bf16"), reason="this processor has no AVX-512-BF16")
@settings(max_examples=60)
@given(
    out_features=st.integers(1, 200),
    num_pairs=st.integers(1, 300),
    num_rows=st.integers(1, ROWS + 7),
    exponents=st.lists(st.integers(-140, 20), min_size=2, max_size=8),
    seed=st.integers(0, 1000),
)
def test_pairs_of_bfloat16_have_the_bits_of_float32_products(
    out_features: int, num_pairs: int, num_rows: int, exponents: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64)

    def draw(num: int) -> torch.Tensor:
        shape = (num, 2 * num_pairs)
        chosen = scales[torch.randint(len(scales), shape, generator=generator)]
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * chosen).bfloat16()

    weight, inputs = draw(out_features), draw(num_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "prefers_pair_products", lambda: True)
        paired = pack(weight)
        patch.setattr(packing, "prefers_pair_products", lambda: False)
        plain = pack(weight)
    assert (paired.stored, plain.stored) == (np.uint32, np.uint16)
    assert torch.equal(sums(inputs, paired, None), sums(inputs, plain, None))


def test_a_number_of_inputs_that_is_odd_makes_no_pairs() -> None:
    assert pack(torch.ones((3, 5), dtype=torch.bfloat16)).stored is np.uint16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2 * UNIT, 64), (UNIT + 1, 32), (7, 96), (UNIT - 1, 31), (UNIT + 2, 18)])
def test_panels_have_the_values_in_the_order_of_products(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % UNIT))
    expected = padded.view(-1, TILE_COLUMNS, shape[1]).transpose(1, 2)
    packed = pack(weight)
    if isinstance(packed, PairedWeight):
        expected = expected.unflatten(1, (-1, 2)).flip(2).transpose(2, 3)
    assert torch.equal(packed.panels, expected)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages to advise"
)
def test_large_weights_ask_for_huge_pages() -> None:
    tensor = in_own_memory((5, 1 << 19), torch.float32)
    tensor[:] = torch.arange(5)[:, None]
    assert tensor.sum(1).tolist() == [index * (1 << 19) for index in range(5)]
    flags, is_inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(each, 16) for each in found.groups())
            is_inside = first <= tensor.data_ptr() < end
        elif is_inside and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split()
