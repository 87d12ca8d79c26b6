"""Batch-invariant activation functions on the CPU: a token gets the same bits in any batch.

torch splits a tensor into pieces, one per thread, and computes each piece in vectors. The values that are
left at the end of a piece are computed one by one, with another exponential that differs in the last bit. So
a token's keys would depend on how many tokens a step has, and rounding to 8 bits makes the difference
visible. Here each piece is a multiple of the vector length, so no values are left.
"""

from __future__ import annotations

from math import lcm

import torch
from transformers.activations import ACT2CLS

_UNDIVIDED = 1 << 14
"""Most values that torch never divides among threads."""
_PIECE = 1 << 15
"""Values per thread above which most functions use another thread; GELU always uses all threads."""
_STRIDE_BYTES = 128
"""Bytes that torch's loops process at a time: two vectors of at most 64 bytes each."""

_KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})


class RowActivation(torch.nn.Module):
    """Applies an elementwise function, in pieces of whole vectors."""

    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the function's value for each value of ``[..., num_features]``, in the same shape."""
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
    """Return how many leading values can be divided among threads so that each gets whole strides."""
    num_threads = torch.get_num_threads()
    while num_values > _UNDIVIDED:
        num_pieces = min(num_threads, -(-num_values // _PIECE))
        excess = num_values % (stride * lcm(num_pieces, num_threads))
        if not excess:
            break
        num_values -= excess
    return num_values


def make_batch_invariant(model: torch.nn.Module) -> None:
    """Wrap the activation functions of a model on the CPU in ``RowActivation``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _KINDS:
                setattr(parent, name, RowActivation(child))
