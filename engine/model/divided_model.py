"""Prepares one rank's part of a model to run: its packed layers add what the ranks compute."""

from __future__ import annotations

from transformers import PreTrainedModel

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.collectives import Collectives
from quire.engine.model.packed_linear import PackedLinear
from quire.engine.model.parallel_layers import DividedHead, RowLinear
from quire.engine.model.parallel_plan import Division, ParallelPlan


def connect_ranks(
    model: PreTrainedModel, plan: ParallelPlan, vocab_size: int, collectives: Collectives
) -> None:
    """Replace the packed layers of a rank whose results depend on the other ranks.

    Raises:
        UnsupportedModelError: the output layer is no linear layer.
    """
    for path, each in plan.linears.items():
        if each.division is Division.ROW:
            own = model.get_submodule(path)
            assert isinstance(own, PackedLinear)
            borders = each.shares.borders(collectives.num_ranks)
            model.set_submodule(path, RowLinear(own, borders, collectives))
    head = model.get_output_embeddings()
    if not isinstance(head, PackedLinear):
        raise UnsupportedModelError("its output layer is no linear layer, so ranks cannot divide it")
    path = next(name for name, module in model.named_modules() if module is head)
    model.set_submodule(path, DividedHead(head, vocab_size, collectives))
