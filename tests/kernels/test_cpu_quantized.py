"""Quantized linear layers on the CPU: small errors, and the same bits for any number of rows and threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.intrinsics import GROUP, TILE_COLUMNS
from quire.kernels.cpu.products.linear import linear
from quire.kernels.cpu.products.packed_weight import UNIT, EncodedWeight
from quire.kernels.cpu.products.packing import pack
from quire.kernels.cpu.products.quantized_weight import quantize
from quire.kernels.cpu.products.rounding import PEAKS
from quire.kernels.cpu.products.unit_product import ROWS
from tests.testing.linear_layers import check_product, check_rows_and_threads

WEIGHT_DTYPES = ["int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_weight(
    out_features: int, in_features: int, weight_dtype: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, EncodedWeight]:
    """Return a weight, and the same one quantized."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((out_features, in_features), generator=generator).to(dtype)
    return weight, quantize(weight, weight_dtype)


@settings(max_examples=40)
@given(
    weight_dtype=st.sampled_from(WEIGHT_DTYPES),
    dtype=st.sampled_from(DTYPES),
    out_features=st.integers(1, 200),
    num_groups=st.integers(1, 20),
    num_rows=st.integers(1, 2 * ROWS + 1),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_multiplies_by_the_dequantized_weight(
    weight_dtype: str,
    dtype: torch.dtype,
    out_features: int,
    num_groups: int,
    num_rows: int,
    has_bias: bool,
    seed: int,
) -> None:
    _, quantized = random_weight(out_features, num_groups * GROUP, weight_dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((num_rows, num_groups * GROUP), generator=generator).to(dtype)
    bias = torch.zeros(quantized.num_units * UNIT)
    bias[:out_features] = torch.randn(out_features, generator=generator)

    given_bias = bias if has_bias else None
    check_product(linear(inputs, quantized, given_bias), inputs, quantized.unpack(), given_bias)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (320, 96), (192, 4096)])
def test_bits_do_not_depend_on_other_rows_or_on_threads(
    weight_dtype: str, out_features: int, in_features: int
) -> None:
    _, quantized = random_weight(out_features, in_features, weight_dtype)
    check_rows_and_threads(lambda inputs: linear(inputs, quantized, None), in_features)


@pytest.mark.parametrize(("weight_dtype", "largest"), [("int8", 127), ("int4", 8)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_error_is_at_most_a_step(weight_dtype: str, largest: int, scale: float) -> None:
    weight, quantized = random_weight(70, 96, weight_dtype)
    weight, quantized = weight * scale, quantize(weight * scale, weight_dtype)
    groups = weight.unflatten(1, (-1, GROUP))
    steps = groups.abs().amax(-1, keepdim=True) / largest
    errors = (quantized.unpack().unflatten(1, (-1, GROUP)) - groups).abs() / steps
    # The positive integers of 4 bits end at 7, so an 8 loses a whole step. Rounded scales add a little.
    assert float(errors.max()) <= (1.05 if weight_dtype == "int4" else 0.8)
    assert float((errors**2).mean().sqrt()) <= 0.32  # 1 / sqrt(12) is 0.29


def test_with_four_bits_the_scale_is_the_best_of_the_candidates() -> None:
    weight, quantized = random_weight(70, 96, "int4", seed=5)
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    errors = []
    for peak in PEAKS[4]:
        scales = (largest / peak).bfloat16().float()
        errors.append((((groups / scales).round().clamp(-8, 7) * scales - groups) ** 2).sum(-1))
    found = ((quantized.unpack().unflatten(1, (-1, GROUP)) - groups) ** 2).sum(-1)
    torch.testing.assert_close(found, torch.stack(errors).amin(0))
    assert found.mean() < 0.92 * errors[0].mean()


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_integers_are_kept_exactly(weight_dtype: str) -> None:
    peak = {"int8": 127, "int4": -8}[weight_dtype]
    weight = torch.randint(-7, 8, (130, 64), generator=torch.Generator().manual_seed(1)).float()
    weight[:, ::GROUP] = peak
    weight[5] = 0.0
    assert torch.equal(quantize(weight, weight_dtype).unpack(), weight)


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_the_whole_weight(weight_dtype: str, dtype: torch.dtype) -> None:
    _, quantized = random_weight(130, 96, weight_dtype, dtype=dtype)
    indices = torch.tensor([[0, 129], [64, 3]])
    assert quantized.unpack().dtype == quantized.dtype == dtype
    assert torch.equal(quantized.rows(indices), quantized.unpack()[indices])


def test_the_bytes_are_those_of_the_integers_and_scales() -> None:
    plain = pack(torch.zeros(128, 256)).panels.nbytes
    assert random_weight(128, 256, "int8")[1].panels.nbytes == plain * (8 + 16 / GROUP) / 32
    assert random_weight(128, 256, "int4")[1].panels.nbytes == plain * (4 + 16 / GROUP) / 32


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_a_large_weight_is_quantized_in_parts(weight_dtype: str) -> None:
    weight, quantized = random_weight(1000, 2048, weight_dtype)
    parts = [quantize(part, weight_dtype).unpack() for part in weight.split(128)]
    assert torch.equal(quantized.unpack(), torch.cat(parts))


@pytest.mark.parametrize("factor", [1.0, 2.0**-120, 2.0**-140, 2.0**100])
def test_scales_are_chosen_as_by_divisions(factor: float) -> None:
    """Many quotients lie exactly between two integers, and some inverses would overflow."""
    generator = torch.Generator().manual_seed(0)
    halves = torch.randint(-17, 18, (UNIT, 8 * GROUP), generator=generator) / 2
    weight = halves * (1 + torch.randint(0, 128, (UNIT, 1), generator=generator) / 128) * factor
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    expected, least = torch.zeros(largest.shape), torch.full(largest.shape, torch.inf)
    for peak in PEAKS[4]:
        scales = (largest / peak).bfloat16().float()
        divisors = torch.where(scales == 0, 1, scales)
        errors = torch.zeros(largest.shape)
        for value in groups.split(1, dim=-1):
            errors += (value - (value / divisors).round().clamp(-8, 7) * divisors) ** 2
        is_better = (errors < least) | (peak == PEAKS[4][0])
        expected, least = torch.where(is_better, scales, expected), torch.where(is_better, errors, least)
    stored = quantize(weight, "int4").panels[..., -2 * TILE_COLUMNS :].view(torch.bfloat16)
    in_panels = (expected * 2.0**-28).bfloat16().view(-1, TILE_COLUMNS, 8).transpose(1, 2)
    assert torch.equal(stored, in_panels)
