"""Weights of linear layers in the order in which products read them.

The speed of memory limits the decoding of one sequence, and oneDNN reads weights at only half this speed if
there is a single row. Here all weights of a tile are adjacent, in the order in which they are read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.cpu.intrinsics import STORAGE, TILE_COLUMNS
from quire.kernels.cpu.products.amx_product import CHAINS, TILE_SIDE, TILES, may_use_tiles
from quire.kernels.cpu.products.bfloat16_product import PAIRS, swap_pairs

UNIT = 64
"""Output columns that a thread computes at a time; outputs are padded to a multiple of it."""
UNIT_PANELS = UNIT // TILE_COLUMNS
"""Panels of a unit."""
_LEAST_HUGE = 1 << 22
"""Bytes of a tensor that has at least one huge page wherever it begins."""

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Function that returns a tensor of a shape and type whose values are not set."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight as ``[out_features / TILE_COLUMNS, in_features, TILE_COLUMNS]``, padded with zeros."""

    panels: torch.Tensor
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight before it was packed."""
        return self.panels.dtype

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return STORAGE[self.panels.dtype]

    @property
    def num_units(self) -> int:
        """How many times ``UNIT`` columns the padded output has."""
        return self.panels.shape[0] // UNIT_PANELS

    @property
    def unit_bytes(self) -> int:
        """Bytes of the weights of ``UNIT`` columns."""
        return UNIT_PANELS * self.panels[0].nbytes

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs to 8 bits."""
        return False

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[num_rows, in_features]`` of the weight's dtype in the form that products read."""
        return rows.float().contiguous()

    def unpack(self) -> torch.Tensor:
        """Return the weight ``[out_features, in_features]``."""
        return self.rows(torch.arange(self.out_features))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the weight, ``[*indices.shape, in_features]``."""
        return self.panels[indices // TILE_COLUMNS, :, indices % TILE_COLUMNS]


@dataclass(frozen=True)
class EncodedWeight(PackedWeight):
    """A weight in another form than numbers of its dtype.

    Attributes:
        unpacked_dtype: the dtype of the weight that ``unpack`` returns.
    """

    unpacked_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight when it is unpacked."""
        return self.unpacked_dtype


class PairedWeight(PackedWeight):
    """A bfloat16 weight in pairs: ``[out_features / TILE_COLUMNS, in_features / 2, TILE_COLUMNS, 2]``."""

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return PAIRS

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[num_rows, in_features]`` of bfloat16 with swapped pairs."""
        return swap_pairs(rows).contiguous()

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the weight, ``[*indices.shape, in_features]``."""
        return swap_pairs(self.panels[indices // TILE_COLUMNS, :, indices % TILE_COLUMNS].flatten(-2))


@dataclass(frozen=True)
class TiledWeight(PackedWeight):
    """A bfloat16 weight in tiles, see ``amx_product``.

    Attributes:
        panels: ``[out_features / TILE_COLUMNS, in_features / 32, TILE_COLUMNS / 16, 16, 16, 2]``.
        by_tiles: whether tiles multiply it in processes that may use them. Vectors do so in all others.
    """

    by_tiles: bool

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        # Linux permits tiles to each process by itself, and another one may have packed the weight.
        return TILES if self.by_tiles and may_use_tiles() else CHAINS

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[num_rows, in_features]`` in the form that products read."""
        return (swap_pairs(rows) if self.stored is TILES else rows.float()).contiguous()

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the weight, ``[*indices.shape, in_features]``."""
        panel, column = indices // TILE_COLUMNS, indices % TILE_COLUMNS
        pairs = self.panels[panel, :, column // TILE_SIDE, :, column % TILE_SIDE]
        return swap_pairs(pairs.flatten(-3))


def num_padded_panels(out_features: int) -> int:
    """Return the number of panels of a weight whose outputs are padded to whole units."""
    return -(-out_features // UNIT) * UNIT_PANELS


def in_own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the process's own memory, in huge pages if it is large and Linux gives them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without them refuses the advice.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
