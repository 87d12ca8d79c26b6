"""Products in the order of AMX have the bits of the instruction, with tiles and without."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.amx_product import AMX_BFLOAT16
from quire.kernels.cpu.linear import pack, sums
from tests.testing.amx_model import tile_product


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal; any two NaN are."""
    is_nan = left.isnan() & right.isnan()
    return bool((is_nan | (left.view(torch.int32) == right.view(torch.int32))).all())


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -9e-39, 1.2e-38, 3e38, -3e38, 1e-20, torch.inf, -torch.inf, torch.nan]


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, 7),
    num_blocks=st.integers(1, 3),
    exponents=st.lists(st.integers(-130, 60), min_size=1, max_size=6),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
    seed=st.integers(0, 1 << 20),
)
def test_vectors_have_the_bits_of_the_instruction(
    num_rows: int, num_blocks: int, exponents: list[int], special: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([2.0**each for each in exponents], dtype=torch.float64)

    def draw(count: int) -> torch.Tensor:
        shape = (count, 32 * num_blocks)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values *= scales[torch.randint(len(scales), shape, generator=generator)]
        # Half of the values cancel others.
        values[:, 1::4] = -values[:, ::4]
        for each in special:
            values.view(-1)[int(torch.randint(values.numel(), (), generator=generator))] = each
        return values.bfloat16()

    inputs, weight = draw(num_rows), draw(5)
    weight[:, 1::4] = weight[:, ::4].abs()
    packed = pack(weight, AMX_BFLOAT16)
    assert isinstance(packed, TiledWeight)
    expected = tile_product(torch.zeros(num_rows, 5), inputs, weight)
    assert same_bits(sums(inputs, packed, None)[:, :5], expected)
