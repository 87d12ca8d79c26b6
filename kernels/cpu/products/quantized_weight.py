"""Weights of linear layers in 8 or 4 bits, for the kernels in ``linear``.

A group of ``GROUP`` inputs of an output column shares one bfloat16 scale, as in llama.cpp's formats Q8_0 and
Q4_0, whose scale is a float16. With 4 bits, the scale is the one of several candidates that makes the sum of
squared errors smallest. With the types int8 and int4, the inputs of a layer are not quantized: the kernels
convert the integers to float32 in registers. With w4a8, they are rounded to 8 bits; see ``group_product``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import (
    GROUP,
    STORAGE,
    TILE_COLUMNS,
    encode,
    fetch_and_increment,
    pointer,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.group_product import NIBBLES, SCALE_FACTOR
from quire.kernels.cpu.products.group_weight import GroupWeight
from quire.kernels.cpu.products.packed_weight import Allocate, EncodedWeight, in_own_memory, num_padded_panels
from quire.kernels.cpu.products.panels import ARGUMENTS, fill_panels, padded_parts
from quire.kernels.cpu.products.rounding import find_scales, read_group, write_words
from quire.kernels.cpu.products.stored_types import group_bytes

QUANTIZED: dict[str, Any] = {"int8": np.int8, "int4": np.uint8, "w4a8": NIBBLES}
"""NumPy type that stands for weights of a dtype in Numba."""
_BITS = {"int8": 8, "int4": 4, "w4a8": 4}


@dataclass(frozen=True)
class QuantizedWeight(EncodedWeight):
    """A weight in groups of integers with scales.

    Attributes:
        panels: uint8 ``[out_features / TILE_COLUMNS, in_features / GROUP, bytes of a group]``; see
            ``packed_product`` for the bytes.
        weight_dtype: a key of ``QUANTIZED``.
    """

    weight_dtype: str

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return QUANTIZED[self.weight_dtype]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the dequantized weight, ``[*indices.shape, in_features]``."""
        bits = _BITS[self.weight_dtype]
        num_bytes = 4 * GROUP * bits // 32 * TILE_COLUMNS
        panel, column = indices // TILE_COLUMNS, indices % TILE_COLUMNS
        words = self.panels[:, :, :num_bytes].unflatten(-1, (-1, TILE_COLUMNS, 4))[panel, :, :, column]
        scales = self.panels[:, :, num_bytes:].view(torch.bfloat16)[panel, :, column]
        integers = words.view(torch.int8)
        if bits == 4:
            integers = torch.cat([integers << 4 >> 4, integers >> 4], dim=-1)
        values: torch.Tensor = integers.flatten(-2).float() * (scales.float() * 2.0 ** (32 - bits))[..., None]
        return values.reshape(*indices.shape, self.in_features).to(self.unpacked_dtype)


def quantize(weight: torch.Tensor, weight_dtype: str, allocate: Allocate = in_own_memory) -> EncodedWeight:
    """Quantize a weight ``[out_features, in_features]`` of any float dtype.

    Args:
        weight: the weight, whose number of inputs is a multiple of ``GROUP``.
        weight_dtype: a key of ``QUANTIZED``.
        allocate: allocates the packed weight.
    """
    out_features, in_features = weight.shape
    bits, num_panels = _BITS[weight_dtype], num_padded_panels(out_features)
    panels = allocate((num_panels, in_features // GROUP, group_bytes(bits)), torch.uint8)
    for part, target in padded_parts(weight, panels):
        fill_panels(_kernel(STORAGE[weight.dtype], bits, weight_dtype == "w4a8"), part, target)
    if weight_dtype == "w4a8":
        return GroupWeight(panels, out_features, in_features, weight.dtype, NIBBLES)
    return QuantizedWeight(panels, out_features, in_features, weight.dtype, weight_dtype)


@cache
def _kernel(stored: Any, bits: int, is_unsigned: bool) -> Any:
    """Compile the function that each thread runs: it quantizes the next panel until none is left."""
    item_bytes, num_bytes = np.dtype(stored).itemsize, group_bytes(bits)
    factor = np.float32(SCALE_FACTOR if is_unsigned else 2.0 ** (bits - 32))

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        num_groups = args.in_features // GROUP
        group = np.empty((GROUP, TILE_COLUMNS), np.float32)
        scales, divisors = np.empty((2, TILE_COLUMNS), np.float32)
        group_at, divisors_at = np.int64(group.ctypes.data), np.int64(divisors.ctypes.data)
        while True:
            panel = np.int64(fetch_and_increment(args.next_panel))
            if panel >= args.num_panels:
                break
            for index in range(num_groups):
                source = args.weight + item_bytes * (panel * TILE_COLUMNS * args.in_features + index * GROUP)
                read_group(source, args.in_features, group, stored, item_bytes)
                find_scales(group_at, np.int64(scales.ctypes.data), divisors_at, bits)
                target = np.int64(args.panels + (panel * num_groups + index) * num_bytes)
                write_words(group_at, divisors_at, target, bits)
                after_words = target + GROUP * TILE_COLUMNS * bits // 8
                if is_unsigned:
                    words = carray(pointer(target, np.uint32), (GROUP * TILE_COLUMNS * bits // 32,))
                    for word in range(len(words)):
                        words[word] ^= np.uint32(0x88888888)
                stored_scales = carray(pointer(after_words, np.uint16), (TILE_COLUMNS,))
                for column in range(TILE_COLUMNS):
                    stored_scales[column] = encode(scales[column] * factor, np.uint16)

    return compile_kernel(ARGUMENTS, kernel)
