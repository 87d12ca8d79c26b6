"""Weights of linear layers in 8 bits, whose inputs are quantized to 8 bits too; see ``integer_product``."""

from __future__ import annotations

from typing import Any

import torch

from quire.kernels.cpu.integer_product import INPUTS, INTEGERS, LEAST_PEAK, PANEL_TRAILER, ROW_HEADER
from quire.kernels.cpu.intrinsics import TILE_COLUMNS
from quire.kernels.cpu.linear import EncodedWeight, num_padded_panels


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers of float32 rows, as float32, and their scales ``[..., 1]``.

    A value that is not finite makes the scale of its row NaN, and the integers zeros.
    """
    peaks = rows.abs().amax(-1, keepdim=True)
    is_finite, counts = peaks.isfinite(), peaks >= LEAST_PEAK
    # torch computes 127 / peaks as a multiplication by the reciprocal, which rounds twice.
    inverses = torch.full_like(peaks, 127) / peaks
    integers = (rows * torch.where(counts, inverses, 0)).round()
    scales = torch.where(is_finite, torch.where(counts, peaks, 0) / 127, torch.nan)
    return torch.where(is_finite, integers, 0), scales


class IntegerWeight(EncodedWeight):
    """A weight in integers with one scale for each output.

    Attributes:
        panels: uint8 ``[out_features / TILE_COLUMNS, bytes of a panel]``.
    """

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return INTEGERS

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs to 8 bits."""
        return True

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of inputs as uint8 ``[num_rows, ROW_HEADER + in_features]``."""
        integers, scales = quantize_rows(rows.float())
        operands = torch.zeros((len(rows), ROW_HEADER + self.in_features), dtype=torch.uint8)
        operands[:, ROW_HEADER:] = (integers + 128).to(torch.uint8)
        operands[:, :4] = scales.view(torch.uint8)
        return operands

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the dequantized weight, ``[*indices.shape, in_features]``."""
        panel, column = indices // TILE_COLUMNS, indices % TILE_COLUMNS
        words = self.panels[:, :-PANEL_TRAILER].view(len(self.panels), -1, TILE_COLUMNS, INPUTS)
        scales = self.panels[:, -PANEL_TRAILER:].view(torch.float32)[panel, column]
        integers = words.view(torch.int8)[panel, :, column].flatten(-2)
        return (integers * scales[..., None]).to(self.unpacked_dtype)


def quantize_to_integers(weight: torch.Tensor) -> IntegerWeight:
    """Quantize a weight ``[out_features, in_features]`` of any float dtype; inputs are a multiple of 4."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for first in range(0, len(weight), TILE_COLUMNS):
        values = weight[first : first + TILE_COLUMNS].float()
        own = values.abs().amax(-1) / 127
        rounded = (values / torch.where(own > 0, own, 1)[:, None]).round().clamp(-127, 127)
        integers[first : first + TILE_COLUMNS], scales[first : first + TILE_COLUMNS] = rounded, own
    return pack_integers(integers, scales, weight.dtype)


def pack_integers(integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> IntegerWeight:
    """Pack int8 ``[out_features, in_features]`` with float32 scales ``[out_features]``.

    Args:
        dtype: the model's dtype.
    """
    out_features, in_features = integers.shape
    num_panels = num_padded_panels(out_features)
    panels = torch.zeros((num_panels, in_features * TILE_COLUMNS + PANEL_TRAILER), dtype=torch.uint8)
    for panel in range(-(-out_features // TILE_COLUMNS)):
        own = slice(panel * TILE_COLUMNS, (panel + 1) * TILE_COLUMNS)
        padding = (0, (panel + 1) * TILE_COLUMNS - min(own.stop, out_features))
        values = torch.nn.functional.pad(integers[own], (0, 0, *padding))
        words = values.view(TILE_COLUMNS, -1, INPUTS).transpose(0, 1)
        panels[panel, :-PANEL_TRAILER] = words.reshape(-1).view(torch.uint8)
        factors = torch.nn.functional.pad(scales[own], padding).view(torch.int32)
        trailer = torch.stack((factors, values.sum(-1).to(torch.int32)))
        panels[panel, -PANEL_TRAILER:] = trailer.view(-1).view(torch.uint8)
    return IntegerWeight(panels, out_features, in_features, dtype)
