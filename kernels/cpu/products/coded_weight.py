"""Packs the codes and scales of quantized checkpoints as they are; see ``coded_product``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numba import from_dtype

from quire.kernels.cpu.intrinsics import GROUP, TILE_COLUMNS
from quire.kernels.cpu.products.coded_product import CODINGS, UINT4, ZERO_MASK, place_in_word
from quire.kernels.cpu.products.packed_weight import EncodedWeight, num_padded_panels

_BYTES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
"""The torch dtype of codes of 8 bits, by the field of their NumPy type."""
_ORDER = sorted(range(8), key=lambda number: place_in_word(number, 4))
"""The inputs of a word of 4-bit codes, from the lowest bits on."""


@dataclass(frozen=True)
class CodedWeight(EncodedWeight):
    """A weight in codes.

    Attributes:
        panels: uint8 ``[out_features / TILE_COLUMNS, in_features / GROUP, bytes of a group]``.
        coding: the NumPy type that stands for it in Numba.
    """

    coding: Any

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return self.coding

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the dequantized weight, ``[*indices.shape, in_features]``."""
        coding, columns = CODINGS[from_dtype(self.coding)], indices % TILE_COLUMNS
        num_bytes = coding.group_bytes - 4 * TILE_COLUMNS
        panels = self.panels[indices // TILE_COLUMNS]
        chosen = columns[..., None, None].expand(*panels.shape[:-1], 1)
        words = panels[..., num_bytes:].view(torch.int32).gather(-1, chosen)
        rows = panels[..., :num_bytes].unflatten(-1, (-1, TILE_COLUMNS * (4 if coding.table else 1)))
        if coding.table is not None:
            rows = rows.view(torch.int32).gather(-1, chosen[..., None].expand(*rows.shape[:-1], 1))
            places = torch.tensor([4 * place_in_word(number, 4) for number in range(8)])
            values = torch.tensor(coding.table)[(rows >> places & 15).flatten(-2)]
        else:
            codes = rows.gather(-1, chosen[..., None].expand(*rows.shape[:-1], 1)).squeeze(-1)
            values = codes.contiguous().view(_BYTES[self.coding.names[0]]).float()
        if coding.has_zeros:
            values = values - (words & ZERO_MASK)
            words = words & ~ZERO_MASK
        return (values * words.view(torch.float32)).flatten(-2).to(self.unpacked_dtype)


def pack_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    coding: Any,
    dtype: torch.dtype,
) -> CodedWeight:
    """Pack a weight.

    Args:
        codes: ``[out_features, in_features]``: integers below 16 as uint8, or values of 8 bits.
        scales: float32 ``[out_features, in_features / GROUP]``. With zero points, the bits of ``ZERO_MASK``
            in them are zeros.
        zeros: zero points of the same shape if the coding is ``UINT4``, at most ``ZERO_MASK``; else None.
        coding: one of the types of ``coded_product``.
        dtype: the model's dtype.
    """
    out_features, in_features = codes.shape
    words = scales.contiguous().view(torch.int32)
    if coding == UINT4:
        assert zeros is not None
        words = words | zeros.to(torch.int32)
    octets = codes.contiguous().view(torch.uint8)
    if CODINGS[from_dtype(coding)].table is not None:
        ordered = octets.unflatten(1, (-1, 8))[..., _ORDER]
        octets = (ordered[..., ::2] | ordered[..., 1::2] << 4).flatten(1)
    per_row = 4 if CODINGS[from_dtype(coding)].table else 1
    num_panels = num_padded_panels(out_features)
    padding = (0, 0, 0, num_panels * TILE_COLUMNS - out_features)
    octets, words = (torch.nn.functional.pad(each, padding) for each in (octets, words))
    # [panels, columns, groups, rows, bytes of a row and column]
    grouped = octets.view(num_panels, TILE_COLUMNS, in_features // GROUP, -1, per_row)
    parts = (
        grouped.permute(0, 2, 3, 1, 4).flatten(2),
        words.view(num_panels, TILE_COLUMNS, -1).transpose(1, 2).contiguous().view(torch.uint8),
    )
    return CodedWeight(torch.cat(parts, dim=2), out_features, in_features, dtype, coding)
