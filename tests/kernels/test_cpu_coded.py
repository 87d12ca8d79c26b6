"""Products with codes of quantized checkpoints have the bits of those with dequantized weights in float32."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.intrinsics import GROUP
from quire.kernels.cpu.products import coded_product
from quire.kernels.cpu.products.coded_weight import CodedWeight, pack_codes
from quire.kernels.cpu.products.linear import linear, sums
from quire.kernels.cpu.products.packing import pack
from quire.kernels.cpu.products.unit_product import ROWS

CODINGS = ["INT4", "UINT4", "E2M1", "INT8", "E4M3"]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def random_codes(
    name: str, out_features: int, in_features: int, dtype: torch.dtype = torch.float32
) -> tuple[CodedWeight, torch.Tensor]:
    """Return a random packed weight, and the float32 weight that it stands for."""
    generator = torch.Generator().manual_seed(7)
    shape = out_features, in_features
    scales = torch.rand((out_features, in_features // GROUP), generator=generator)
    codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    values, zeros = codes.float(), None
    if name == "INT4":
        values -= 8
    elif name == "UINT4":
        scales = scales.half().float()
        zeros = torch.randint(0, 17, scales.shape, generator=generator).float()
        values -= zeros.repeat_interleave(GROUP, 1)
    elif name == "E2M1":
        values = torch.tensor(E2M1)[codes.int()]
    elif name == "INT8":
        codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
        values = codes.float()
    else:
        # All values but the two that are not numbers.
        octets = torch.randint(0, 127, shape, generator=generator) + torch.arange(in_features) % 2 * 128
        codes = octets.to(torch.uint8).view(torch.float8_e4m3fn)
        values = codes.float()
    packed = pack_codes(codes, scales, zeros, getattr(coded_product, name), dtype)
    return packed, values * scales.repeat_interleave(GROUP, 1)


@pytest.mark.parametrize("name", CODINGS)
def test_products_have_the_bits_of_dequantized_weights(name: str) -> None:
    for out_features, in_features in ((70, 96), (320, 800)):
        packed, weight = random_codes(name, out_features, in_features)
        plain = pack(weight)
        inputs = torch.randn((ROWS + 5, in_features), generator=torch.Generator().manual_seed(2))
        expected = linear(inputs, plain, None)
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (1, 2, 3, 4, 5, 7, ROWS, ROWS + 5):
                assert torch.equal(linear(inputs[:num_rows], packed, None), expected[:num_rows])


@pytest.mark.parametrize("name", ["UINT4", "INT8"])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_segments_have_the_bits_of_dequantized_weights(name: str, num_rows: int) -> None:
    packed, weight = random_codes(name, 130, 4 * 3 * GROUP)
    inputs = torch.randn((num_rows, packed.in_features), generator=torch.Generator().manual_seed(3))
    for num_segments, own in ((4, None), (2, range(6 * GROUP, 12 * GROUP))):
        expected = sums(inputs, pack(weight), None, num_segments, own)
        assert torch.equal(sums(inputs, packed, None, num_segments, own), expected)


@pytest.mark.parametrize("name", CODINGS)
def test_unpacked_weights_are_the_dequantized_ones(name: str) -> None:
    packed, weight = random_codes(name, 130, 96, torch.bfloat16)
    assert packed.dtype == packed.unpack().dtype == torch.bfloat16
    assert torch.equal(packed.unpack(), weight.bfloat16())
    indices = torch.tensor([[0, 129], [64, 3]])
    assert torch.equal(packed.rows(indices), weight.bfloat16()[indices])


def test_the_bytes_are_those_of_the_codes_and_a_scale_for_each_group() -> None:
    plain = pack(torch.zeros(128, 256)).panels.nbytes
    for name in CODINGS:
        bits = 8 if name in ("INT8", "E4M3") else 4
        assert random_codes(name, 128, 256)[0].panels.nbytes == plain * (bits + 32 / GROUP) / 32
