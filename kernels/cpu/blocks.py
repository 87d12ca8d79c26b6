"""Block writes on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

Array = np.ndarray[Any, np.dtype[Any]]


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See ``ops.write_kv``."""
    _write(_bits(key), _bits(value), _bits(kv_layer), slot_mapping.numpy())


def _bits(tensor: torch.Tensor) -> Array:
    """Return a view that Numba can copy: NumPy has no bfloat16."""
    view: Array = (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()
    return view


@njit(cache=True, nogil=True)
def _write(key: Array, value: Array, kv_layer: Array, slot_mapping: Array) -> None:
    block_size = kv_layer.shape[3]
    for token in range(slot_mapping.shape[0]):
        block, offset = slot_mapping[token] // block_size, slot_mapping[token] % block_size
        for head in range(kv_layer.shape[2]):
            for d in range(kv_layer.shape[4]):
                kv_layer[block, 0, head, offset, d] = key[token, head, d]
                kv_layer[block, 1, head, offset, d] = value[token, head, d]
