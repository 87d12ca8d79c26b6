"""Linear layers on the CPU in which each group of rows has a weight of its own, such as experts.

The sums are those of ``linear``. A row's bits therefore do not depend on the other rows, or on which groups
have rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from quire.kernels.cpu.products.linear import ROWS, UNIT, PackedWeight, multiply_chunks


class WeightGroup:
    """Packed weights of one shape and type, and their biases.

    Args:
        weights: the weights.
        biases: ``[num_weights, out_features]``, or None.
    """

    def __init__(self, weights: Sequence[PackedWeight], biases: torch.Tensor | None) -> None:
        self.weights = weights
        self.biases: torch.Tensor | None = None
        if biases is not None:
            self.biases = torch.zeros((len(weights), weights[0].num_units * UNIT))
            self.biases[:, : biases.shape[1]] = biases.detach()

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy needs: its tensors have other addresses."""
        return {"weights": self.weights, "biases": self.biases}

    @cached_property
    def addresses(self) -> list[tuple[int, int]]:
        """The addresses of each weight and of its bias, which is 0 if there is none."""
        biases = [0] * len(self.weights) if self.biases is None else [row.data_ptr() for row in self.biases]
        return [(weight.panels.data_ptr(), bias) for weight, bias in zip(self.weights, biases, strict=True)]


def grouped_sums(inputs: torch.Tensor, group: WeightGroup, ends: Sequence[int]) -> torch.Tensor:
    """Multiply the rows of each weight by it, and return float32 ``[num_rows, out_features]``.

    Args:
        inputs: ``[num_rows, in_features]``, in the dtype of the weights.
        group: the weights.
        ends: for each weight the end of its rows, which begin at the end of the previous weight's rows. Rows
            after the last end have no weight, and their results are undefined.
    """
    chunks, start = [], 0
    for end, (weight_at, bias_at) in zip(ends, group.addresses, strict=True):
        for first in range(start, end, ROWS):
            chunks.append((first, min(ROWS, end - first), weight_at, bias_at))
        start = end
    weight = group.weights[0]
    return multiply_chunks(weight.operands(inputs), chunks, weight)[:, : weight.out_features]
