"""The buffers of a compiled step, which its program and the modules between its parts read and write."""

from __future__ import annotations

import torch

from quire.engine.model.program.recipe import StepRecipe
from quire.kernels.cpu.attention_program import Array

_MOST_KEPT_LOGITS = 256
"""Memory for this number of logits rows is reused from step to step."""
_KEPT = {"hidden": "qkv", "attended": "queries"}
"""Buffers of the tokens that the last layer computes, each with the free buffer for its copy."""


class StepBuffers:
    """Buffers whose addresses are in a step's two records.

    Args:
        steps: the records, which have the sizes.
        recipe: description of the model's computation.
        num_columns: number of outputs of the linear layers of a layer with a state.

    Attributes:
        capacity: for how many tokens there is room.
        keeps_all_rows: whether the last layer computes all tokens, in the same buffers.
    """

    def __init__(self, steps: Array, recipe: StepRecipe, num_columns: int) -> None:
        self._steps, self._dtype = steps, recipe.dtype
        self._widths = _widths(steps[0], recipe, num_columns)
        self._buffers: dict[str, torch.Tensor] = {}
        self.capacity = 0
        self._logits = torch.empty((0, int(steps[0]["logits_stride"])))
        self.keeps_all_rows = True

    def grow(self, num_rows: int) -> bool:
        """Make room for the values of ``num_rows`` tokens; return whether the addresses change."""
        if self.capacity >= num_rows:
            return False
        self.capacity = max(64, 1 << (num_rows - 1).bit_length())
        for name, width in self._widths.items():
            self._buffers[name] = torch.empty((self.capacity, width))
            self._steps[name] = self._buffers[name].data_ptr()
        self.keep_rows(self.keeps_all_rows)
        return True

    def keep_rows(self, keeps_all_rows: bool) -> None:
        """Give the program its second step, which uses the first step's buffers, or free ones for copies."""
        self.keeps_all_rows = keeps_all_rows
        for name, copies in _KEPT.items():
            self._steps[1][name] = self._steps[0][name if keeps_all_rows else copies]

    def logits(self, num_logits: int) -> torch.Tensor:
        """Return float32 ``[num_logits, logits_stride]``, valid until the next step."""
        if num_logits > _MOST_KEPT_LOGITS:
            return torch.empty((num_logits, self._logits.shape[1]))
        if len(self._logits) < num_logits:
            size = min(_MOST_KEPT_LOGITS, 1 << (num_logits - 1).bit_length())
            self._logits = torch.empty((size, self._logits.shape[1]))
        return self._logits[:num_logits]

    def normed(self, first: int, end: int) -> torch.Tensor:
        """Return the float32 inputs of a part, or the hidden states, of some rows."""
        return self._buffers["normed"][first:end]

    def inputs(self, num_rows: int) -> torch.Tensor:
        """Return the inputs of a module, ``[1, num_rows, hidden_size]``."""
        return self.normed(0, num_rows).to(self._dtype)[None]

    def computed(self, num_rows: int) -> torch.Tensor:
        """Return what the program adds to the residual stream, ``[num_rows, hidden_size]``."""
        return self._buffers["update"][:num_rows, : self._widths["normed"]].to(self._dtype)

    def update(self, rows: torch.Tensor) -> None:
        """Keep what a module adds to the residual stream."""
        self._buffers["update"][: rows.shape[0], : rows.shape[1]] = rows

    def copy_hidden(self, rows: torch.Tensor) -> None:
        """Copy some rows of the residual stream to where the second step has them."""
        size = self._widths["hidden"]
        copies = self._buffers[_KEPT["hidden"]].view(-1)[: len(rows) * size]
        copies.view(-1, size).copy_(self._buffers["hidden"][rows])


def _widths(fields: Array, recipe: StepRecipe, num_columns: int) -> dict[str, int]:
    """Return how many values a token has in each buffer."""
    hidden_size, mlp_stride = int(fields["hidden_size"]), int(fields["mlp_stride"])
    outputs = [each.output for each in recipe.attentions] + [each.output for each in recipe.states]
    attended = int(fields["num_heads"] * fields["head_dim"])
    attended = max((attended, *(each.in_features for each in outputs)))
    expanded = (each.query_up.out_features for each in recipe.latents if each.query_up)
    return {
        "hidden": hidden_size,
        "normed": hidden_size,
        "qkv": max(int(fields["qkv_stride"]), hidden_size, num_columns),
        "queries": attended,
        "attended": attended,
        "update": int(fields["update_stride"]),
        "mlp": mlp_stride,
        "operands": max(hidden_size, mlp_stride, attended, *expanded),
    }
