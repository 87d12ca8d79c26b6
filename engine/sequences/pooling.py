"""Pools the hidden states of a prompt into its embedding, as its chunks are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.models.embeddings import Pooling


@dataclass(eq=False, slots=True)
class PooledPrompt:
    """The sum of the hidden states at some positions of a prompt, as far as they are computed.

    All sums are made in order, so that an embedding has the same bits in any steps and on any processor.

    Attributes:
        positions: the positions that are pooled.
        dimensions: number of the first values that are kept.
        normalizes: whether the embedding gets the length 1.
        num_pooled: how many of them have been added, from the first on.
        total: float64 ``[hidden_size]``; 0 before the first position.
    """

    positions: range
    dimensions: int
    normalizes: bool
    num_pooled: int = 0
    total: Any = 0.0

    @classmethod
    def of(cls, pooling: Pooling, num_tokens: int, dimensions: int, *, normalizes: bool) -> PooledPrompt:
        """Return the empty sum over the positions of a prompt that a kind of pooling reads."""
        first = num_tokens - 1 if pooling is Pooling.LAST else 0
        positions = range(first, 1 if pooling is Pooling.CLS else num_tokens)
        return cls(positions, dimensions, normalizes)

    def missing(self, first: int, end: int) -> range:
        """Return the positions from ``first`` to ``end`` that are pooled and have not been added yet."""
        start = max(first, self.positions.start + self.num_pooled)
        return range(start, max(start, min(end, self.positions.stop)))

    def add(self, hidden: torch.Tensor) -> None:
        """Add the states ``[num_positions, hidden_size]`` at the next positions."""
        rows = hidden.double().cpu().numpy()
        rows[0] += self.total
        self.total = np.add.accumulate(rows)[-1]
        self.num_pooled += len(rows)

    def embedding(self) -> list[float]:
        """Return the mean of the states, rounded to float32."""
        mean = self.total[: self.dimensions] / self.num_pooled
        length = np.sqrt(np.add.accumulate(mean * mean)[-1]) if self.normalizes else 1.0
        values: list[float] = (mean / max(length, np.finfo(np.float64).tiny)).astype(np.float32).tolist()
        return values
