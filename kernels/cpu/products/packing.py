"""Packs weights in panels, in pairs of bfloat16 or in AMX tiles, as processor and arithmetic need them."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from quire.kernels.cpu.intrinsics import TILE_COLUMNS
from quire.kernels.cpu.products.amx_product import (
    AMX_BFLOAT16,
    FLOAT32,
    TILE_INPUTS,
    TILE_SIDE,
    may_use_tiles,
)
from quire.kernels.cpu.products.bfloat16_product import prefers_pair_products
from quire.kernels.cpu.products.linear import sums
from quire.kernels.cpu.products.packed_weight import (
    UNIT,
    Allocate,
    PackedWeight,
    PairedWeight,
    TiledWeight,
    in_own_memory,
    num_padded_panels,
)
from quire.kernels.cpu.products.panels import padded_parts
from quire.kernels.cpu.products.transposed import HALVES, SWAPPED, WORDS, can_transpose, transpose_panels

logger = logging.getLogger(__name__)


def pack(weight: torch.Tensor, arithmetic: str = FLOAT32, allocate: Allocate = in_own_memory) -> PackedWeight:
    """Pack a weight ``[out_features, in_features]`` of a dtype in ``STORAGE`` with at least 16 bits.

    A bfloat16 weight is packed in pairs if the processor multiplies these fast.

    Args:
        weight: the weight.
        arithmetic: ``FLOAT32`` or ``AMX_BFLOAT16``, the order of sums. The latter needs bfloat16 and whole
            tiles of inputs; weights that differ have the order of ``FLOAT32``.
        allocate: allocates the packed weight.
    """
    out_features, in_features = weight.shape
    is_bfloat16 = weight.dtype == torch.bfloat16
    if arithmetic == AMX_BFLOAT16 and is_bfloat16 and in_features % TILE_INPUTS == 0:
        tiles = _in_tiles(_in_panels(weight), allocate)
        return TiledWeight(tiles, out_features, in_features, tiles_are_exact())
    if is_bfloat16 and in_features % 2 == 0 and prefers_pair_products():
        pairs = _in_panels(weight, allocate, in_pairs=True).view(-1, in_features // 2, TILE_COLUMNS, 2)
        return PairedWeight(pairs, out_features, in_features)
    return PackedWeight(_in_panels(weight, allocate), out_features, in_features)


def _in_panels(
    weight: torch.Tensor, allocate: Allocate = in_own_memory, *, in_pairs: bool = False
) -> torch.Tensor:
    """Return a weight as ``[num_panels, in_features, TILE_COLUMNS]``, with zeros at the end.

    Args:
        in_pairs: whether each two values of a column lie together, with the second one first.
    """
    out_features, in_features = weight.shape
    panels = allocate((num_padded_panels(out_features), in_features, TILE_COLUMNS), weight.dtype)
    for part, target in padded_parts(weight, panels):
        if can_transpose(in_features, weight.itemsize):
            order = WORDS if weight.itemsize == 4 else SWAPPED if in_pairs else HALVES
            transpose_panels(part, target, order)
        else:
            _transpose_slowly(part.view(-1, TILE_COLUMNS, in_features), target, in_pairs)
    return panels


def _transpose_slowly(weight: torch.Tensor, panels: torch.Tensor, in_pairs: bool) -> None:
    """Write whole panels of a weight of any size."""
    values = weight.transpose(1, 2)
    if in_pairs:
        values = values.unflatten(1, (-1, 2)).flip(2).transpose(2, 3)
    panels[: len(weight)] = values.reshape(-1, *panels.shape[1:])


def _in_tiles(panels: torch.Tensor, allocate: Allocate = in_own_memory) -> torch.Tensor:
    shape = (len(panels), -1, TILE_SIDE, 2, TILE_COLUMNS // TILE_SIDE, TILE_SIDE)
    tiles = panels.view(shape).flip(3).permute(0, 1, 4, 2, 5, 3)
    return allocate(tuple(tiles.shape), tiles.dtype).copy_(tiles)


@cache
def tiles_are_exact() -> bool:
    """Return whether this process may use tiles, and their products have the bits of vectors.

    The order of sums is known from Intel's manual. This shows that the present processor keeps to it.
    """
    if not may_use_tiles():
        return False
    random, shape = np.random.Generator(np.random.PCG64(0)), (2 * TILE_SIDE + 1 + UNIT, 4 * TILE_INPUTS)
    # Some of the values and of their products are denormal.
    values = torch.from_numpy(random.standard_normal(shape) * 2.0 ** random.integers(-140, 20, shape))
    inputs, weight = values.bfloat16().split([2 * TILE_SIDE + 1, UNIT])
    tiles = TiledWeight(_in_tiles(_in_panels(weight)), UNIT, shape[1], by_tiles=True)
    return have_same_sums(inputs, tiles, replace(tiles, by_tiles=False))


def have_same_sums(inputs: torch.Tensor, tiles: PackedWeight, vectors: PackedWeight) -> bool:
    """Return whether sums by tiles have the bits of sums by vectors; if not, log it.

    Args:
        inputs: rows for more than two rows of tiles.
        tiles, vectors: the same weight, for products by tiles and by vectors.
    """
    for num_rows in (1, TILE_SIDE + 1, 2 * TILE_SIDE + 1):
        if not torch.equal(sums(inputs[:num_rows], tiles, None), sums(inputs[:num_rows], vectors, None)):
            logger.warning(
                "the AMX tiles of this processor do not round as its manual says, so prompts are slower"
            )
            return False
    return True
