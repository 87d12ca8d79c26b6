"""Activation functions on the CPU that give a token the same bits alone and in company.

torch computes a tensor in pieces, one a thread, and a piece in vectors; what is left at its end goes value by
value, through another exponential that differs in the last bit. So a token's keys would depend on how many
tokens a step has, which rounding to 8 bits makes visible. Here no piece has such an end.
"""

from __future__ import annotations

from math import lcm

import torch
from transformers.activations import ACT2CLS

_UNDIVIDED = 1 << 14
"""Values that torch never divides among threads."""
_PIECE = 1 << 15
"""Values of a thread from which on most functions take another; GELU takes all threads at once."""
_STRIDE_BYTES = 128
"""Two vectors of at most 64 bytes each, which torch's loops take at a time."""

_KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})


class RowActivation(torch.nn.Module):
    """An elementwise function, whole vectors at a time."""

    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the function of each value of ``[..., num_features]``."""
        stride = _STRIDE_BYTES // inputs.itemsize
        num_features = inputs.shape[-1]
        if num_features % stride:
            padded = torch.nn.functional.pad(inputs, (0, -num_features % stride))
            return self.forward(padded)[..., :num_features]
        num_even = _most_even(inputs.numel(), stride)
        if num_even == inputs.numel():
            output: torch.Tensor = self._function(inputs)
            return output
        values = inputs.reshape(-1)
        parts = [values[:num_even], *torch.split(values[num_even:], _UNDIVIDED)]
        return torch.cat([self._function(part) for part in parts]).view(inputs.shape)


def _most_even(num_values: int, stride: int) -> int:
    """Return how many of the values divide among threads so that each gets whole strides."""
    num_threads = torch.get_num_threads()
    while num_values > _UNDIVIDED:
        num_pieces = min(num_threads, -(-num_values // _PIECE))
        excess = num_values % (stride * lcm(num_pieces, num_threads))
        if not excess:
            break
        num_values -= excess
    return num_values


def keep_rows_alike(model: torch.nn.Module) -> None:
    """Wrap the activation functions of a model on the CPU."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _KINDS:
                setattr(parent, name, RowActivation(child))
