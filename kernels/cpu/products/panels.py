"""Fills the panels of a weight on all threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import TILE_COLUMNS

_FIELDS = ("weight", "panels", "in_features", "num_panels", "next_panel")
ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])
"""Arguments of a kernel that takes the next panel until none is left; see ``fill_panels``."""


def padded_parts(weight: torch.Tensor, panels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of a weight that are whole panels, the last one with zeros, each with its first panel.

    All panels from the last one on become zeros first.
    """
    num_whole = len(weight) // TILE_COLUMNS
    panels[num_whole:] = 0
    whole, rest = weight.split([num_whole * TILE_COLUMNS, len(weight) % TILE_COLUMNS])
    yield whole, panels
    yield torch.nn.functional.pad(rest, (0, 0, 0, -len(rest) % TILE_COLUMNS)), panels[num_whole:]


def fill_panels(kernel: Any, weight: torch.Tensor, panels: torch.Tensor) -> None:
    """Fill panels from a weight ``[num_panels * TILE_COLUMNS, in_features]`` by a kernel of ``ARGUMENTS``."""
    weight = weight.contiguous()
    addresses, sizes = (weight.data_ptr(), panels.data_ptr()), (weight.shape[1], len(weight) // TILE_COLUMNS)
    counter = _FIELDS.index("next_panel")
    threads.run_with_counter(kernel.address, (*addresses, *sizes, 0), counter, torch.get_num_threads())
