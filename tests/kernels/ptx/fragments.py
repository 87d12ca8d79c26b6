"""Which element of a matrix each thread of a warp holds, in ``mma`` and ``ldmatrix``.

The layouts are those of "Matrix Fragments for mma.m16n8k16" and "ldmatrix" in NVIDIA's PTX ISA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.arithmetic import widen_bfloat16

Array = NDArray[Any]
WARP = 32
_LANE = np.arange(WARP)
_GROUP, _PAIR = _LANE[:, None] // 4, _LANE[:, None] % 4

# A thread's elements are numbered in order of its registers, low half first. All of these are [32, elements].
_I = np.arange(8)
A_ROWS, A_COLUMNS = _GROUP + 8 * (_I // 2 % 2), 2 * _PAIR + _I % 2 + 8 * (_I // 4)
_I = np.arange(4)
B_ROWS, B_COLUMNS = 2 * _PAIR + _I % 2 + 8 * (_I // 2), _GROUP + 0 * _I
C_ROWS, C_COLUMNS = _GROUP + 8 * (_I // 2), 2 * _PAIR + _I % 2


def _float16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


WIDEN: dict[str, Callable[[Array], Array]] = {"bf16": widen_bfloat16, "f16": _float16}


def multiply(a: Array, b: Array, c: Array, kind: str) -> Array:
    """Compute ``mma.m16n8k16`` of every warp: ``D = A B + C`` with float32 sums.

    Args:
        a, b: registers, uint32 ``[warps, 32, 4]`` and ``[warps, 32, 2]``, each with two 16-bit elements.
        c: float32 ``[warps, 32, 4]``.
        kind: ``bf16`` or ``f16``.

    Returns:
        D in the layout of C.
    """
    num_warps = len(a)
    left = np.empty((num_warps, 16, 16), np.float32)
    right = np.empty((num_warps, 16, 8), np.float32)
    left[:, A_ROWS, A_COLUMNS] = WIDEN[kind](a.view(np.uint16))
    right[:, B_ROWS, B_COLUMNS] = WIDEN[kind](b.view(np.uint16))
    product: Array = c + (left @ right)[:, C_ROWS, C_COLUMNS]
    return product


def distribute(matrices: Array, is_transposed: bool) -> Array:
    """Return what ``ldmatrix`` gives each thread of every warp.

    Args:
        matrices: uint16 ``[warps, matrices, 8, 8]`` in order of rows.

    Returns:
        Registers, uint32 ``[matrices, warps, 32]``, each with two elements.
    """
    if is_transposed:
        matrices = matrices.swapaxes(2, 3)
    # Thread t gets the elements 2 (t % 4) and 2 (t % 4) + 1 of row t // 4, the pair t in order of rows.
    pairs = np.ascontiguousarray(matrices).reshape(*matrices.shape[:2], 2 * WARP).view(np.uint32)
    return pairs.swapaxes(0, 1)
