"""What kernels read besides tensors: the sequences of a step, and their adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class AttentionMetadata(NamedTuple):
    """One step's sequences, packed without padding.

    ::

        query_starts   0          3   4                    9
        tokens         [ seq 0    | 1 | seq 2              ]     new tokens of this step
        seq_lens         3          40  105                      cached + new tokens of each sequence

    Attributes:
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]``; entries past a sequence's length are ignored.
        query_starts: int32 ``[num_seqs + 1]``, the index of each sequence's first new token, followed by
            ``num_tokens``.
        seq_lens: int32 ``[num_seqs]``, cached and new tokens of each sequence.
        slot_mapping: int64 ``[num_tokens]``, ``block_id * block_size + offset`` of each new token; a negative
            number means that the token is not written.
        max_new_tokens: the most new tokens of any sequence, if the host knows it, else None. If it is 1, a
            GPU does not launch the prefill kernel.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    max_new_tokens: int | None = None

    def of_frame(self, frame: int) -> AttentionMetadata:
        """Return the metadata of the layers in one frame of each block.

        If blocks have several frames, ``block_tables`` and ``slot_mapping`` have one entry for each.
        """
        if self.block_tables.dim() == 2:
            assert frame == 0, "the tables are those of blocks of one frame"
            return self
        return self._replace(block_tables=self.block_tables[frame], slot_mapping=self.slot_mapping[frame])


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter (LoRA, Hu et al., 2021) of the linear layers of one loaded model.

    Sequences that use it keep its memory alive.

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
