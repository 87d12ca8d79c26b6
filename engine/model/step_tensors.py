"""The input tensors of one forward call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.metadata import AttentionMetadata


class RowAdapters(NamedTuple):
    """The adapters of a step's tokens.

    Attributes:
        addresses: ``[num_tokens]``, see ``Adapter.address``; 0 for none.
        max_rank: the largest of their ranks.
    """

    addresses: np.ndarray[tuple[int], np.dtype[np.int64]]
    max_rank: int


class StepTensors(NamedTuple):
    """The new tokens of all sequences, packed without padding.

    Attributes:
        input_ids: int64 ``[num_tokens]``.
        positions: int64 ``[num_tokens]``.
        logit_rows: int64 ``[num_logits + num_hidden]``, indices of the tokens after which logits are needed,
            and then of those whose hidden states are needed.
        metadata: the sequences of the tokens, and the slots for their keys and values.
        adapters: None if no token has one.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    metadata: AttentionMetadata
    num_hidden: int = 0
    adapters: RowAdapters | None = None

    @property
    def num_logits(self) -> int:
        """Number of tokens after which logits are needed."""
        return self.logit_rows.shape[0] - self.num_hidden

    def to(self, device: torch.device) -> StepTensors:
        """Return a copy of all tensors on a device."""
        metadata = self.metadata
        moved = AttentionMetadata(
            metadata.block_tables.to(device),
            metadata.query_starts.to(device),
            metadata.seq_lens.to(device),
            metadata.slot_mapping.to(device),
            metadata.max_new_tokens,
        )
        rows = self.logit_rows.to(device)
        return StepTensors(self.input_ids.to(device), self.positions.to(device), rows, moved, self.num_hidden)


Forward = Callable[[StepTensors], torch.Tensor]
"""Function that returns the logits of a step."""
