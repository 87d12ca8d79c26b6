"""The NumPy types that stand for torch's dtypes in CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

STORAGE: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.int8: np.int8,
    torch.float8_e4m3fn: np.uint8,
}
"""NumPy type that represents each dtype in Numba; ``intrinsics.widen`` converts from these types."""

QUANTIZED: dict[str, Any] = {"int8": np.int8, "int4": np.uint8}
"""NumPy type that stands for quantized weights in Numba, by their name; see ``packed_product``."""
