"""Runs the model over one step's tokens: packed, without padding."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.attention import PagedStep
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel
from quire.engine.scheduler import Schedule, ScheduledSequence
from quire.kernels.metadata import AttentionMetadata


class ModelRunner:
    """Turns scheduled sequences into logits; ``swap_memory`` holds the blocks of preempted groups."""

    def __init__(self, model: LoadedModel, memory: KvMemory, swap_memory: KvMemory | None = None) -> None:
        self.model = model
        self.memory = memory
        self._swap_memory = swap_memory
        self._device = memory.blocks.device

    def move_blocks(self, schedule: Schedule) -> None:
        """Copy blocks to and from host memory, then those that are about to be written."""
        if self._swap_memory is not None:
            self._swap_memory.copy_from(self.memory, schedule.swap_out)
            self.memory.copy_from(self._swap_memory, schedule.swap_in)
        self.memory.copy_from(self.memory, schedule.copies)

    def prepare(self, scheduled: list[ScheduledSequence]) -> dict[str, torch.Tensor | PagedStep]:
        """Pack the new tokens of all sequences into the arguments of one forward call."""
        block_size = self.memory.shape.block_size
        num_new = np.array([s.num_scheduled_tokens for s in scheduled], dtype=np.int32)
        computed = np.array([s.sequence.num_computed_tokens for s in scheduled], dtype=np.int32)
        starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(num_new, out=starts[1:])
        # Position of each packed token: its sequence's computed tokens, plus its place among the new ones.
        owner = np.repeat(np.arange(len(scheduled)), num_new)
        positions = np.arange(starts[-1], dtype=np.int64) + (computed - starts[:-1])[owner]
        # Blocks that were given back are left out: attention over windows knows distances alone. What the
        # kernels call a sequence's length is thus that of what it holds.
        held = [s.sequence.held_blocks for s in scheduled]
        dropped = np.array([s.sequence.num_dropped_blocks for s in scheduled], dtype=np.int32) * block_size
        tables = np.zeros((len(scheduled), max(map(len, held))), dtype=np.int32)
        token_ids: list[int] = []
        rows_to_score: list[np.ndarray] = []
        for row, (sequence, num_tokens) in enumerate(scheduled):
            tables[row, : len(held[row])] = held[row]
            first = sequence.num_computed_tokens
            token_ids += sequence.token_ids[first : first + num_tokens]
            if scored := sequence.positions_to_score(num_tokens):
                rows_to_score.append(starts[row] + np.arange(scored.start - first, scored.stop - first))
        places = positions - dropped[owner]
        slots = tables[owner, places // block_size].astype(np.int64) * block_size + places % block_size
        metadata = AttentionMetadata(
            block_tables=self._tensor(tables),
            query_starts=self._tensor(starts),
            seq_lens=self._tensor(computed + num_new - dropped),
            slot_mapping=self._tensor(slots),
        )
        return {
            "input_ids": torch.tensor([token_ids], device=self._device),
            "position_ids": self._tensor(positions)[None],
            "logits_to_keep": self._tensor(np.concatenate([starts[1:] - 1, *rows_to_score], dtype=np.int64)),
            "paged_step": PagedStep(metadata, self.memory.layers),
        }

    @torch.inference_mode()
    def forward(self, arguments: dict[str, torch.Tensor | PagedStep]) -> torch.Tensor:
        """Return logits, ``[num_sequences + num_scored, vocab_size]``.

        First those after each sequence's last new token, then those of ``Sequence.positions_to_score``.
        """
        output = self.model.module(use_cache=False, **arguments)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
