"""The modules that compute a part of some layers, between two parts of a step's program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.layers.attention import PagedStep
from quire.engine.model.layers.experts import shared_expert
from quire.engine.model.program.buffers import StepBuffers
from quire.engine.model.program.recipe import StepRecipe
from quire.engine.model.states import States
from quire.engine.model.step_tensors import StepTensors


class ModuleCall(NamedTuple):
    """A module in a layer.

    Attributes:
        number: that of the layer.
        is_mlp: whether it has the place of the MLP, and not of attention.
        shared: its expert of all tokens, if the program computes it.
    """

    number: int
    is_mlp: bool
    module: torch.nn.Module
    shared: torch.nn.Module | None

    @property
    def next_part(self) -> tuple[int, bool]:
        """The first layer of the part of the program behind it, and whether it begins with the MLP."""
        return self.number + self.is_mlp, not self.is_mlp


class ModuleCalls:
    """Calls modules with the values in a step's buffers.

    Args:
        recipe: description of the model's computation.
        memory: its KV blocks.
        states: where states lie in these; None if there are none.
        buffers: the buffers.

    Attributes:
        calls: the modules in their order.
    """

    def __init__(
        self, recipe: StepRecipe, memory: KvMemory, states: States | None, buffers: StepBuffers
    ) -> None:
        self._memory, self._states, self._buffers = memory, states, buffers
        self.calls = [
            ModuleCall(number, is_mlp, part, None if layer.shared is None else shared_expert(part))
            for number, layer in enumerate(recipe.layers)
            for is_mlp, part in ((False, layer.attention), (True, layer.mlp))
            if isinstance(part, torch.nn.Module)
        ]
        self._has_mixers = not all(each.is_mlp for each in self.calls)

    def options(self, tensors: StepTensors, tables: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, Any]:
        """Return a step's arguments of the modules that have the place of attention.

        Args:
            tensors: the step.
            tables: the cosines and sines of each of the model's rotations.
        """
        if not self._has_mixers:
            return {}
        memory, positions = self._memory, tensors.positions
        rotations = tables[0] if len(tables) == 1 else ()
        return {
            "position_embeddings": tuple(each[positions][None] for each in rotations) or None,
            "attention_mask": None,
            "position_ids": positions[None],
            "past_key_values": None,
            "paged_step": PagedStep(
                tensors.metadata, memory.layers, memory.scales, iter(()), memory.frames, self._states
            ),
        }

    def run(
        self, call: ModuleCall, options: dict[str, Any], num_rows: int, kept: torch.Tensor | None
    ) -> None:
        """Run a module.

        Args:
            call: the module.
            options: see ``options``.
            num_rows: number of tokens of the step.
            kept: indices of the tokens that the last layer computes; None in other layers.
        """
        buffers = self._buffers
        if call.is_mlp:
            # The program has computed the expert that is shared by all tokens.
            if num_rows := num_rows if kept is None else len(kept):
                with _returning(buffers.computed(num_rows), call.shared):
                    buffers.update(_rows(call.module(buffers.inputs(num_rows))))
            return
        numbers = iter(getattr(call.module, "kv_layers", ()))
        own = {**options, "paged_step": options["paged_step"]._replace(numbers=numbers)}
        rows = _rows(call.module(hidden_states=buffers.inputs(num_rows), **own))
        if kept is not None and not buffers.keeps_all_rows:
            rows = rows[kept]
            buffers.copy_hidden(kept)
        buffers.update(rows)


@contextmanager
def _returning(rows: torch.Tensor, module: torch.nn.Module | None) -> Iterator[None]:
    """Let a module return these rows, whose inputs are all rows of the step."""
    if module is None:
        yield
        return
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda inputs: rows.view(inputs.shape)
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def _rows(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the rows that a module computes; some modules return more than that."""
    return (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).flatten(0, -2)
