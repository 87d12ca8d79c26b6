"""Linear layers of one rank, which add or gather the ranks' results. They replace the model's own layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.collectives import Collectives, pieces
from quire.engine.model.layers.experts import divide_experts
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.model.parallel_plan import Division, ParallelPlan
from quire.kernels.cpu.products.linear import linear, sums
from quire.kernels.cpu.products.packed_weight import UNIT


class RowLinear(PackedLinear):
    """A rank's part of a linear layer whose inputs are divided among ranks; their partial sums are added.

    Args:
        own: the layer with this rank's inputs and segments, and the bias of the whole layer.
        borders: the first segment of each rank, and the number of segments.
        collectives: those of the ranks.

    Attributes:
        borders: the same as int64.
    """

    def __init__(self, own: PackedLinear, borders: Sequence[int], collectives: Collectives) -> None:
        torch.nn.Module.__init__(self)
        self.packed, self.bias, self.num_segments = own.packed, own.bias, own.num_segments
        self.out_features, self.in_features = own.out_features, own.in_features
        self.borders = np.array(borders, np.int64)
        self._collectives = collectives

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the whole layer, from this rank's inputs.

        Raises:
            RanksError: a rank has failed.
        """
        depth = self.in_features // self.num_segments
        partials = [
            sums(inputs, self.packed, None, len(piece), range(piece.start * depth, piece.stop * depth))
            for piece in pieces(self.borders, self._collectives.rank)
        ]
        total = self._collectives.sum(partials, self.borders)
        if self.bias is not None:
            total += self.bias
        output = total[:, : self.out_features].to(inputs.dtype)
        return output.reshape(*inputs.shape[:-1], self.out_features)


class DividedHead(PackedLinear):
    """The output layer, which computes this rank's share of the logits.

    Args:
        own: the layer, with all outputs or only those of this rank.
        vocab_size: number of logits.
        collectives: those of the ranks.

    Attributes:
        first_unit: the first of this rank's units of columns in the packed weight.
        num_units: number of this rank's units.
        first_column: the logit of the first column.
    """

    def __init__(self, own: PackedLinear, vocab_size: int, collectives: Collectives) -> None:
        torch.nn.Module.__init__(self)
        self.packed, self.bias, self.num_segments = own.packed, own.bias, own.num_segments
        self.out_features, self.in_features = vocab_size, own.in_features
        self._collectives = collectives
        first, end = head_units(vocab_size, collectives.rank, collectives.num_ranks)
        self.first_unit = first if own.out_features == vocab_size else 0
        self.num_units = end - first
        self.first_column = first * UNIT

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return all ranks' logits.

        Raises:
            RanksError: a rank has failed.
        """
        columns = linear(inputs, self.packed, self.bias).reshape(-1, self.packed.out_features)
        columns = columns[:, self.first_unit * UNIT : (self.first_unit + self.num_units) * UNIT]
        logits = self._collectives.gather_logits(columns.float(), self.first_column)
        return logits[:, : self.out_features].to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features)


def head_units(vocab_size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first unit of logits of a rank, and the first one of the next rank."""
    num_units = -(-vocab_size // UNIT)
    return num_units * rank // num_ranks, num_units * (rank + 1) // num_ranks


def connect_ranks(
    model: PreTrainedModel, plan: ParallelPlan, vocab_size: int, collectives: Collectives
) -> None:
    """Replace those packed layers of a rank that need results of other ranks.

    Raises:
        UnsupportedModelError: the output layer is no linear layer.
    """
    for path, each in plan.linears.items():
        if each.division is Division.ROW:
            own = model.get_submodule(path)
            assert isinstance(own, PackedLinear)
            borders = each.shares.borders(collectives.num_ranks)
            model.set_submodule(path, RowLinear(own, borders, collectives))
    for path, divided in plan.experts.items():
        divide_experts(model.get_submodule(path), divided, collectives)
    head = model.get_output_embeddings()
    if not isinstance(head, PackedLinear):
        raise UnsupportedModelError("its output layer is no linear layer, so ranks cannot divide it")
    path = next(name for name, module in model.named_modules() if module is head)
    model.set_submodule(path, DividedHead(head, vocab_size, collectives))
