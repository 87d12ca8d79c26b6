"""Norms and activation functions, compared with torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from quire.kernels.cpu.rows import Activation, Gate, Norm, activation, norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU: functional.gelu,
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
    Activation.TANH: torch.tanh,
    Activation.COSINE: torch.cos,
    Activation.SINE: torch.sin,
    Activation.SIGMOID: torch.sigmoid,
}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, num_units: float) -> None:
    """Check that values agree within some units in the last place of the largest one."""
    assert actual.dtype == expected.dtype
    largest = float(expected.double().abs().max())
    error = float((actual.double() - expected.double()).abs().max())
    assert error <= num_units * torch.finfo(expected.dtype).eps * max(1.0, largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", list(Activation), ids=lambda kind: kind.name)
def test_an_activation_is_torchs(kind: Activation, dtype: torch.dtype) -> None:
    values = torch.linspace(-30, 30, 4999).to(dtype)
    assert_near(activation(values, kind), FUNCTIONS[kind](values), 2)


@pytest.mark.parametrize("kind", list(Activation), ids=lambda kind: kind.name)
def test_an_activation_hides_no_nan(kind: Activation) -> None:
    values = torch.ones(40)
    values[[3, 37]] = torch.nan
    assert torch.equal(activation(values, kind).isnan(), values.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 16, 100, 768])
def test_a_norm_is_torchs(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    rows = (torch.randn((5, length), generator=generator) * 3 + 1).to(dtype)
    weight, bias = torch.randn((2, length), generator=generator)
    wide = rows.float()
    layer_norm = functional.layer_norm(wide, (length,), weight, bias, 1e-5).to(dtype)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    rounded_first = weight.to(dtype) * scaled.to(dtype)
    rounded_last = (scaled * weight).to(dtype)

    assert_near(norm(rows, Norm.LAYER, weight, bias, 1e-5), layer_norm, 8)
    assert_near(norm(rows, Norm.RMS, weight.to(dtype).float(), None, 1e-6), rounded_first, 4)
    assert_near(norm(rows, Norm.RMS_IN_FLOAT32, weight, None, 1e-6), rounded_last, 4)


@pytest.mark.parametrize("kind", [Norm.RMS, Norm.RMS_IN_FLOAT32, Norm.LAYER], ids=lambda kind: kind.name)
def test_a_rows_bits_do_not_depend_on_other_rows(kind: Norm) -> None:
    rows = torch.randn((600, 100), generator=torch.Generator().manual_seed(1))
    weight, bias = torch.ones(100), torch.zeros(100)
    together = norm(rows, kind, weight, bias, 1e-6)
    for index in (0, 1, 599):
        assert torch.equal(norm(rows[index], kind, weight, bias, 1e-6), together[index])
    gates = activation(rows, Activation.SILU)
    assert torch.equal(activation(rows[7], Activation.SILU), gates[7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_gate_multiplies_before_or_after_the_norm(dtype: torch.dtype, is_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    # Rows of a view are not contiguous.
    values, gates = torch.randn((5, 2, 4, 48), generator=generator)[..., :40].to(dtype).split(1, dim=1)
    weight = torch.randn((4, 40), generator=generator)

    def normed(rows: torch.Tensor) -> torch.Tensor:
        of_groups = [
            norm(rows[:, :, g], Norm.RMS_IN_FLOAT32, weight[g].clone(), None, 1e-6) for g in range(4)
        ]
        return torch.stack(of_groups, dim=2)

    factors = activation(gates, Activation.SILU)
    gate = Gate(gates, Activation.SILU, is_first)
    found = norm(values, Norm.RMS_IN_FLOAT32, weight, None, 1e-6, gate=gate)
    if dtype == torch.float32:
        assert torch.equal(found, normed(values * factors) if is_first else normed(values) * factors)
    else:
        expected = (
            normed(values.float() * factors.float()) if is_first else normed(values).float() * factors.float()
        )
        assert_near(found, expected.to(dtype), 2)
    product = norm(values, Norm.NONE, None, None, 0.0, gate=gate)
    assert torch.equal(product, values * factors)
