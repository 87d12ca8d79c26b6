"""What holds of every linear layer on the CPU, however its weights are packed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.cpu.products.unit_product import ROWS

Layer = Callable[[torch.Tensor], torch.Tensor]


def check_rows_and_threads(layer: Layer, in_features: int, dtype: torch.dtype = torch.float32) -> None:
    """Check that neither other rows nor the number of threads change the bits of a row."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn((ROWS + 40, in_features), generator=generator).to(dtype)
    expected = layer(inputs)
    for num_threads in (1, 2, 3, 4):
        torch.set_num_threads(num_threads)
        for num_rows in (*range(1, 36), ROWS, ROWS + 1, ROWS + 40):
            assert torch.equal(layer(inputs[:num_rows]), expected[:num_rows])
        assert torch.equal(layer(inputs[17:18]), expected[17:18])


def check_product(
    output: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Check an output against the product in double precision, to a rounding of the inputs' dtype."""
    expected = inputs.double() @ weight.double().T
    if bias is not None:
        expected += bias[: len(weight)].double()
    assert output.dtype == inputs.dtype
    largest, error = float(expected.abs().max()), float((output.double() - expected).abs().max())
    epsilon = torch.finfo(inputs.dtype).eps * (64 if inputs.dtype == torch.float32 else 1)
    assert error <= max(largest, 1.0) * epsilon


def in_pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add tensors in pairs, the pairs in pairs, and so on."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
