"""An adapter (LoRA, Hu et al., 2021) as the kernels read it. It changes linear layers of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of one model. Sequences that use it keep its memory alive.

    Attributes:
        digest: identifies its weights; two adapters with equal digests compute the same.
        address: of its ``kernels.cpu.low_rank.UPDATE`` for each layer and linear layer.
        rank: largest rank of its updates, padded.
        held: the memory that the addresses refer to.
    """

    digest: str
    address: int
    rank: int
    held: Any = field(repr=False)
