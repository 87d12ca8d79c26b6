"""What the ranks of a worker do together, and the fixed tree in which their partial sums are added.

A rank is a process. All ranks call the same collectives in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from quire.kernels.cpu import exchange

Int64s = np.ndarray[Any, np.dtype[np.int64]]

_piece_size: Callable[[int, int], int] = exchange.piece_size.py_func  # type: ignore[attr-defined]


class RanksError(RuntimeError):
    """A rank has ended, failed or does not answer; the worker must end."""


class Collectives(ABC):
    """The collectives of one rank. One thread calls them.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks.
        has_own_files: whether this rank reads the model from files that may not be those of rank 0.
    """

    rank: int
    num_ranks: int
    has_own_files: bool

    @abstractmethod
    def sum(self, partials: Sequence[torch.Tensor], borders: Int64s) -> torch.Tensor:
        """Return the sum of all ranks' tensors ``[num_rows, width]`` in float32, in a fixed tree.

        Args:
            partials: the sums of this rank's ``pieces``.
            borders: the first segment of each rank, and the number of segments.

        Raises:
            RanksError: a rank has failed, or the tensors are larger than those of the model.
        """

    @abstractmethod
    def gather_logits(self, columns: torch.Tensor, borders: Sequence[int]) -> torch.Tensor:
        """Return the logits ``[num_rows, borders[-1]]`` of which each rank has some columns.

        Rank 0 has all of them afterwards. What the others get depends on the collectives.

        Args:
            columns: this rank's columns.
            borders: the first column of each rank, and the number of columns.

        Raises:
            RanksError: a rank has failed, or there are more rows than a step may have.
        """


def pieces(borders: Int64s, rank: int) -> list[range]:
    """Return the segments of each of a rank's pieces, counted from its own first segment."""
    own_first, end = borders[rank : rank + 2].tolist()
    first, found = own_first, []
    while first < end:
        size = _piece_size(first, end)
        found.append(range(first - own_first, first - own_first + size))
        first += size
    return found
