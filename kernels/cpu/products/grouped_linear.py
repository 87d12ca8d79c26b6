"""Linear layers on the CPU in which each group of rows has a weight of its own, such as experts.

The sums are those of ``linear``. A row's bits therefore do not depend on the other rows, or on which groups
have rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.cpu.kernel_cache import stored_njit
from quire.kernels.cpu.products.linear import multiply_chunks
from quire.kernels.cpu.products.packed_weight import UNIT, PackedWeight
from quire.kernels.cpu.products.unit_product import ROWS
from quire.kernels.cpu.weighted_sums import Int64s
from quire.kernels.torch_functions import without_replacements


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
    def addresses(self) -> Int64s:
        """``[num_weights, 2]``: the addresses of each weight and of its bias, which is 0 if there is none."""
        biases = [0] * len(self.weights) if self.biases is None else [row.data_ptr() for row in self.biases]
        return np.array([[weight.panels.data_ptr() for weight in self.weights], biases], np.int64).T.copy()


class Groups(NamedTuple):
    """Which of some choices of weights belong to which weight.

    Attributes:
        choices: those that have a weight, ordered by it, and then as they were.
        weights: the weight of each of ``choices``.
        ends: for each weight, the end of its part of ``choices``.
        places: for each token where its choices are in ``choices``, in ascending order and followed by
            numbers of no choice, ``[num_tokens, num_choices]``.
    """

    choices: Int64s
    weights: Int64s
    ends: Int64s
    places: Int64s


@stored_njit
def _group(chosen: Int64s, first: int, num_weights: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    num_tokens, num_choices = chosen.shape
    ends, weights = np.zeros(num_weights + 1, np.int64), np.empty(num_tokens * num_choices, np.int64)
    for choice in range(num_tokens * num_choices):
        weight = chosen[choice // num_choices, choice % num_choices] - first
        weights[choice] = weight if 0 <= weight < num_weights else num_weights
        ends[weights[choice]] += 1
    starts = np.cumsum(ends) - ends
    choices, places = np.empty(len(weights), np.int64), np.empty((num_tokens, num_choices), np.int64)
    for choice in range(len(weights)):
        place = starts[weights[choice]]
        starts[weights[choice]] += 1
        choices[place] = choice
        places[choice // num_choices, choice % num_choices] = place
    for token in range(num_tokens):
        places[token].sort()
    choices = choices[: starts[num_weights - 1]]
    return choices, weights[choices], starts[:num_weights], places


def group_choices(chosen: Int64s, first: int, num_weights: int) -> Groups:
    """Group the weights that tokens have chosen, ``[num_tokens, num_choices]``, by the weight.

    The first of ``num_weights`` weights has the number ``first``. Choices of other numbers have no weight.
    """
    return Groups(*_group(chosen, first, num_weights))


@stored_njit
def _chunks(ends: Int64s, addresses: Int64s, most_rows: int) -> Int64s:
    """Return the chunks of ``multiply_chunks``, and a row of zeros behind them."""
    num_weights, num_chunks, start = len(ends), 0, 0
    chunks = np.zeros((ends[-1] // most_rows + num_weights + 1, 4), np.int64)
    for weight in range(num_weights):
        for first in range(start, ends[weight], most_rows):
            chunks[num_chunks, 0], chunks[num_chunks, 1] = first, min(most_rows, ends[weight] - first)
            chunks[num_chunks, 2:4] = addresses[weight]
            num_chunks += 1
        start = ends[weight]
    return chunks[: num_chunks + 1]


@without_replacements
def grouped_sums(inputs: torch.Tensor, group: WeightGroup, ends: Int64s) -> torch.Tensor:
    """Multiply the rows of each weight by it, and return float32 ``[num_rows, out_features]``.

    Args:
        inputs: ``[num_rows, in_features]``, in the dtype of the weights.
        group: the weights.
        ends: for each weight the end of its rows, which begin at the end of the previous weight's rows. Rows
            after the last end have no weight, and their results are undefined.
    """
    weight = group.weights[0]
    chunks = _chunks(ends, group.addresses, ROWS)
    operands = weight.operands(inputs)
    sums = multiply_chunks(operands, chunks.ctypes.data, len(chunks) - 1, weight)
    return sums[:, : weight.out_features]
