"""The input tensors of consecutive steps in which the same sequences compute one token each."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.model.step_tensors import RowAdapters, StepTensors
from quire.engine.runner.step_tables import Int32s, StepTables
from quire.engine.sequences.sequence import ScheduledSequence
from quire.kernels.metadata import AttentionMetadata


class DecodeBatch:
    """Allocates the tensors once; each step then overwrites their values.

    Args:
        scheduled: the sequences of the first step, with one token each.
        tables: the block tables of the sequences.
        block_size: tokens per block.
    """

    def __init__(self, scheduled: list[ScheduledSequence], tables: StepTables, block_size: int) -> None:
        self._scheduled = scheduled
        self._sequences = [each.sequence for each in scheduled]
        self._tables = tables
        self._block_size = block_size
        num_sequences = len(scheduled)
        self._token_ids = np.zeros(num_sequences, dtype=np.int64)
        self._positions = np.zeros(num_sequences, dtype=np.int64)
        self._slots = np.zeros(tables.slots_shape(num_sequences), dtype=np.int64)
        self._seq_lens = np.zeros(num_sequences, dtype=np.int32)
        self._block_ids: Int32s = np.zeros((0, 0), dtype=np.int32)
        self._tensors = StepTensors(
            torch.from_numpy(self._token_ids),
            torch.from_numpy(self._positions),
            torch.arange(num_sequences),
            AttentionMetadata(
                block_tables=torch.from_numpy(self._block_ids),
                query_starts=torch.arange(num_sequences + 1, dtype=torch.int32),
                seq_lens=torch.from_numpy(self._seq_lens),
                slot_mapping=torch.from_numpy(self._slots),
                max_new_tokens=1,
            ),
            adapters=row_adapters(scheduled),
        )

    @staticmethod
    def fits(scheduled: list[ScheduledSequence]) -> bool:
        """Return whether a step computes one token of each sequence, and scores and pools no prompt."""
        return all(
            num_tokens == 1 and sequence.params.num_prompt_logprobs is None and sequence.pooled is None
            for sequence, num_tokens in scheduled
        )

    def has(self, scheduled: list[ScheduledSequence]) -> bool:
        """Return whether a step computes one token of each of these sequences."""
        return scheduled == self._scheduled

    def next_step(self) -> StepTensors:
        """Return the tensors of the next token of each sequence, valid until the next call."""
        sequences, size = self._sequences, self._block_size
        held = self._tables.of(sequences)
        positions = [each.num_computed_tokens for each in sequences]
        pairs = list(zip(sequences, positions, strict=True))
        self._token_ids[:] = [each.token_ids[position] for each, position in pairs]
        if held.block_ids.ndim == 2:
            self._slots[:] = [each.block_table[at // size] * size + at % size for each, at in pairs]
        else:
            at = np.array(positions)
            self._slots[:] = held.block_ids[:, np.arange(len(at)), at // size] * np.int64(size) + at % size
        self._positions[:] = positions
        self._seq_lens[:] = self._positions
        self._seq_lens -= held.num_left_out
        self._seq_lens += 1
        if held.block_ids is not self._block_ids:
            self._block_ids = held.block_ids
            metadata = self._tensors.metadata._replace(block_tables=torch.from_numpy(held.block_ids))
            self._tensors = self._tensors._replace(metadata=metadata)
        return self._tensors


def row_adapters(scheduled: list[ScheduledSequence]) -> RowAdapters | None:
    """Return the adapter of each token, or None if no sequence has one."""
    adapters = [sequence.adapter for sequence, _ in scheduled]
    if not any(adapters):
        return None
    addresses = np.array([adapter.address if adapter else 0 for adapter in adapters])
    max_rank = max(adapter.rank for adapter in adapters if adapter)
    return RowAdapters(np.repeat(addresses, [num_tokens for _, num_tokens in scheduled]), max_rank)
