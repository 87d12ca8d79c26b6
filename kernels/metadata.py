"""What attention over paged blocks needs to know of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


class HostMetadata(NamedTuple):
    """The same metadata as NumPy arrays, for kernels that run on the CPU."""

    block_tables: Array
    query_starts: Array
    seq_lens: Array
    slot_mapping: Array


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's sequences, packed without padding.

    ::

        query_starts   0          3   4                    9
        tokens         [ seq 0    | 1 | seq 2              ]     new tokens of this step
        seq_lens         3          40  105                      cached + new tokens of each sequence

    Attributes:
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]``; entries past a sequence's length are ignored.
        query_starts: int32 ``[num_seqs + 1]``.
        seq_lens: int32 ``[num_seqs]``.
        slot_mapping: int64 ``[num_tokens]``, ``block_id * block_size + offset`` of each new token.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor

    @cached_property
    def host(self) -> HostMetadata:
        """NumPy views, made once for all layers of a step."""
        return HostMetadata(
            self.block_tables.numpy(),
            self.query_starts.numpy(),
            self.seq_lens.numpy(),
            self.slot_mapping.numpy(),
        )
