"""Linear layers on the CPU with the same inputs, such as queries, keys and values, in one call.

The bits are those of ``linear``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.cpu.products.linear import ROWS, UNIT, Int64s, PackedWeight, multiply_chunks


class JointWeights:
    """Packed weights of one type and number of inputs, and their biases.

    Args:
        weights: the weights.
        biases: for each weight float32 ``[num_units * UNIT]``, or None.
    """

    def __init__(self, weights: Sequence[PackedWeight], biases: Sequence[torch.Tensor | None]) -> None:
        self._weights, self._biases = weights, biases
        self._widths = [weight.num_units * UNIT for weight in weights]
        self._chunks = np.empty((0, 6), np.int64)
        """The chunks of ``multiply_chunks`` for the last number of rows; most steps have the same one."""
        self._num_rows = 0

    def _make_chunks(self, num_rows: int) -> Int64s:
        chunks, output = [], 0
        for weight, bias, width in zip(self._weights, self._biases, self._widths, strict=True):
            weight_at, bias_at = weight.panels.data_ptr(), 0 if bias is None else bias.data_ptr()
            for first in range(0, num_rows, ROWS):
                for unit in range(weight.num_units):
                    unit_at = weight_at + unit * weight.unit_bytes, bias_at and bias_at + 4 * unit * UNIT
                    place = output + first * width + unit * UNIT
                    chunks.append((first, min(ROWS, num_rows - first), *unit_at, place, width))
            output += num_rows * width
        return np.array(chunks, np.int64)

    def linear(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return for each weight what ``linear`` returns, for inputs ``[..., in_features]``."""
        weight = self._weights[0]
        rows = weight.operands(inputs.reshape(-1, weight.in_features))
        if (num_rows := rows.shape[0]) != self._num_rows:
            self._chunks, self._num_rows = self._make_chunks(num_rows), num_rows
        output = torch.empty(num_rows * sum(self._widths))
        multiply_chunks(rows, self._chunks, weight, output, num_units=1)
        results, first = [], 0
        for each, width in zip(self._weights, self._widths, strict=True):
            result = output.as_strided((num_rows, each.out_features), (width, 1), first)
            results.append(result.to(inputs.dtype).view(*inputs.shape[:-1], each.out_features))
            first += num_rows * width
        return results
