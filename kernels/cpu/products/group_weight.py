"""Weights in groups of codes, whose inputs are quantized to 8 bits too; see ``group_product``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numba import from_dtype, types

from quire.kernels.cpu.intrinsics import GROUP, TILE_COLUMNS
from quire.kernels.cpu.products.coded_weight import CodedWeight
from quire.kernels.cpu.products.group_product import GROUP_CODINGS, OPERAND_BYTES, SCALE_FACTOR
from quire.kernels.cpu.products.integer_weight import quantize_rows
from quire.kernels.cpu.products.packed_weight import num_padded_panels

_PLACES = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
"""Places of the upper bits of 4 codes of 6 bits in a byte."""


@dataclass(frozen=True)
class GroupWeight(CodedWeight):
    """A weight in groups of codes, whose inputs are quantized too."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs to 8 bits."""
        return True

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of inputs as the bytes that ``group_product`` describes."""
        integers, scales = quantize_rows(rows.float().unflatten(-1, (-1, GROUP)))
        sums = integers.unflatten(-1, (2, -1)).sum(-1).to(torch.int32)
        parts = (integers.to(torch.int8), scales / SCALE_FACTOR, sums)
        operands = torch.cat([each.view(torch.uint8) for each in parts], dim=-1)
        flat: torch.Tensor = operands.flatten(1)
        assert operands.shape[-1] == OPERAND_BYTES
        return flat

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the dequantized weight, ``[*indices.shape, in_features]``."""
        coding = GROUP_CODINGS[from_dtype(self.coding)]
        panel, column = indices // TILE_COLUMNS, indices % TILE_COLUMNS
        words = self.panels[..., : coding.code_bytes].unflatten(-1, (-1, TILE_COLUMNS, 4))[
            panel, :, :, column
        ]
        codes = words.flatten(-2)
        if coding.bits < 8:
            lower = words[..., : GROUP // 8, :]
            codes = torch.cat([lower & 15, lower >> 4], dim=-1).flatten(-2)
        if coding.bits == 6:
            upper = words[..., GROUP // 8 :, None, :] >> _PLACES & 3
            codes = codes | upper.flatten(-3) << 4
        half = torch.float16 if coding.scale_type == types.int16 else torch.bfloat16
        factors = self.panels[..., coding.code_bytes :].view(half).unflatten(-1, (-1, TILE_COLUMNS))
        # [*indices.shape, groups, scales and perhaps an offset]
        chosen = factors[panel, :, :, column].float() / SCALE_FACTOR
        num_scales = GROUP // coding.per_scale
        values = codes.float() - coding.zero
        values = (values.unflatten(-1, (num_scales, -1)) * chosen[..., :num_scales, None]).flatten(-2)
        if coding.has_offsets:
            values = values + chosen[..., num_scales:]
        weight: torch.Tensor = values.flatten(-2).to(self.unpacked_dtype)
        return weight


def pack_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    coding: Any,
    part: tuple[int, slice] | None,
    dtype: torch.dtype,
) -> GroupWeight | None:
    """Pack a weight; return None if float16 cannot hold a scale, or if the part has no whole groups.

    Args:
        codes: uint8 ``[out_features, in_features]``, whole groups of inputs.
        scales: float32 ``[out_features, in_features / inputs of a scale]``; rounded to float16.
        offsets: float32 ``[out_features, in_features / GROUP]`` if the coding has these; rounded likewise.
        coding: one of the types of ``group_product``.
        part: the dimension along which the weight is divided, and what of it to pack; None packs all.
        dtype: the model's dtype.
    """
    facts, num_groups = GROUP_CODINGS[from_dtype(coding)], codes.shape[1] // GROUP
    factors = [scales.unflatten(1, (num_groups, -1))]
    if offsets is not None:
        factors.append(offsets.unsqueeze(-1))
    halves = (torch.cat(factors, dim=-1) * SCALE_FACTOR).half()
    if not halves.isfinite().all():
        return None
    # [outputs, groups, words, bytes of a word]
    octets = _words(codes.unflatten(1, (num_groups, GROUP)), facts.bits)
    if part is not None:
        dimension, own = part
        if dimension == 1 and (own.start % GROUP or own.stop % GROUP):
            return None
        groups = slice(own.start // GROUP, own.stop // GROUP)
        chosen = (own, slice(None)) if dimension == 0 else (slice(None), groups)
        octets, halves = octets[chosen], halves[chosen]
    out_features, num_groups = octets.shape[:2]
    num_panels = num_padded_panels(out_features)
    parts = []
    for each in (octets, halves.view(torch.uint8).unflatten(-1, (-1, 2))):
        padded = torch.nn.functional.pad(each, (0, 0) * 3 + (0, num_panels * TILE_COLUMNS - out_features))
        parts.append(padded.unflatten(0, (num_panels, TILE_COLUMNS)).permute(0, 2, 3, 1, 4).flatten(2))
    return GroupWeight(torch.cat(parts, dim=2), out_features, num_groups * GROUP, dtype, coding)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes ``[..., GROUP]`` as the bytes of words, ``[..., words, 4]``; see ``group_product``."""
    if bits == 8:
        words: torch.Tensor = codes.unflatten(-1, (-1, 4))
        return words
    first, second = (codes & 15).unflatten(-1, (-1, 2, 4)).unbind(-2)
    words = first | second << 4
    if bits == 6:
        upper = (codes >> 4).unflatten(-1, (-1, 4, 4)) << _PLACES
        words = torch.cat([words, upper.sum(-2, dtype=torch.uint8)], dim=-2)
    return words
