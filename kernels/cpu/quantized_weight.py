"""Weights of linear layers in 8 or 4 bits, for the kernels in ``linear``.

A group of ``GROUP`` inputs of an output column shares one bfloat16 scale, as in llama.cpp's formats Q8_0 and
Q4_0, whose scale is a float16. The inputs of a layer are not quantized: the kernels convert the integers to
float32 in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.kernels.cpu.intrinsics import TILE_COLUMNS
from quire.kernels.cpu.linear import PackedWeight, num_padded_panels
from quire.kernels.cpu.packed_product import GROUP, group_bytes

QUANTIZED: dict[str, Any] = {"int8": np.int8, "int4": np.uint8}
"""NumPy type that stands for weights of a dtype in Numba."""
_BITS = {"int8": 8, "int4": 4}
_PEAKS = {8: 127, 4: -8}
"""Integer that represents the weight of the largest magnitude in a group, by the number of bits.

Four bits can represent -8 but not 8, so the sign of the scale makes this integer negative.
"""
_RANGES = {8: (-127, 127), 4: (-8, 7)}
"""Smallest and largest integer, by the number of bits."""
_CHUNK = 1 << 18
"""Number of weights to quantize at a time, so that little memory is needed in addition to the result."""


@dataclass(frozen=True)
class QuantizedWeight(PackedWeight):
    """A weight in groups of integers with scales.

    Attributes:
        panels: uint8 ``[out_features / TILE_COLUMNS, in_features / GROUP, bytes of a group]``; see
            ``packed_product`` for the bytes.
        weight_dtype: a key of ``QUANTIZED``.
        unpacked_dtype: the dtype of the weight before it was quantized.
    """

    weight_dtype: str
    unpacked_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight before it was quantized."""
        return self.unpacked_dtype

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return QUANTIZED[self.weight_dtype]

    def unpack(self) -> torch.Tensor:
        """Return the dequantized weight ``[out_features, in_features]``."""
        return self.rows(torch.arange(self.out_features))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the dequantized weight, ``[*indices.shape, in_features]``."""
        bits = _BITS[self.weight_dtype]
        num_bytes = 4 * GROUP * bits // 32 * TILE_COLUMNS
        panel, column = indices // TILE_COLUMNS, indices % TILE_COLUMNS
        words = self.panels[:, :, :num_bytes].unflatten(-1, (-1, TILE_COLUMNS, 4))[panel, :, :, column]
        scales = self.panels[:, :, num_bytes:].view(torch.bfloat16)[panel, :, column]
        integers = _unpack_integers(words.view(torch.int8), bits).flatten(-2)
        values = integers.float() * (scales.float() * 2.0 ** (32 - bits))[..., None]
        return values.reshape(*indices.shape, self.in_features).to(self.unpacked_dtype)


def quantize(weight: torch.Tensor, weight_dtype: str) -> QuantizedWeight:
    """Quantize a weight ``[out_features, in_features]`` of any float dtype.

    Args:
        weight: the weight, whose number of inputs is a multiple of ``GROUP``.
        weight_dtype: a key of ``QUANTIZED``.
    """
    out_features, in_features = weight.shape
    bits, num_panels = _BITS[weight_dtype], num_padded_panels(out_features)
    panels = torch.zeros((num_panels, in_features // GROUP, group_bytes(bits)), dtype=torch.uint8)
    step = max(1, _CHUNK // (TILE_COLUMNS * in_features))
    for first in range(0, -(-out_features // TILE_COLUMNS), step):
        rows = weight[first * TILE_COLUMNS : (first + step) * TILE_COLUMNS].float()
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % TILE_COLUMNS))
        part = _quantize_panels(rows.view(-1, TILE_COLUMNS, in_features // GROUP, GROUP), bits)
        panels[first : first + len(part)] = part
    return QuantizedWeight(panels, out_features, in_features, weight_dtype, weight.dtype)


def _quantize_panels(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the bytes of panels ``[num_panels, TILE_COLUMNS, num_groups, GROUP]``."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = (largest / _PEAKS[bits]).bfloat16()
    # A group of zeros has a scale of zero, and dividing by it would give NaN.
    quotients = groups / torch.where(scales == 0, 1, scales.float())
    lowest, highest = _RANGES[bits]
    integers = quotients.round().clamp(lowest, highest).to(torch.int8)
    words = _pack_integers(integers.unflatten(-1, (-1, 32 // bits)), bits)
    # [panels, columns, groups, words, bytes] -> [panels, groups, words, columns, bytes]
    words = words.permute(0, 2, 3, 1, 4).flatten(2).view(torch.uint8)
    scales = (scales[..., 0] / 2 ** (32 - bits)).transpose(1, 2).contiguous()
    return torch.cat([words, scales.view(torch.uint8)], dim=-1)


def _pack_integers(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the bytes of some int8 along the last dimension; two integers of 4 bits share one."""
    return integers if bits == 8 else integers[..., 0::2] & 15 | integers[..., 1::2] << 4


def _unpack_integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the int8 that ``_pack_integers`` packed."""
    if bits == 8:
        return packed
    return torch.stack([packed << 4 >> 4, packed >> 4], dim=-1).flatten(-2)
