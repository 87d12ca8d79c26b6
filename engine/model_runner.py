"""Runs the model over one step's tokens, which are packed without padding."""

from __future__ import annotations

import numpy as np
import torch

from quire.engine.attention import PagedStep
from quire.engine.compiled_step import CompiledStep
from quire.engine.decode_graphs import Capture, DecodeGraphs
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel
from quire.engine.schedule import Schedule, ScheduledSequence
from quire.engine.sequence import Sequence
from quire.engine.step_tensors import StepTensors
from quire.kernels import ops
from quire.kernels.metadata import AttentionMetadata

Tables = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class ModelRunner:
    """Turns scheduled sequences into logits.

    Args:
        model: the model.
        memory: its KV blocks.
        swap_memory: host blocks of preempted groups; None means that there are none.
    """

    def __init__(self, model: LoadedModel, memory: KvMemory, swap_memory: KvMemory | None = None) -> None:
        self.model = model
        self.memory = memory
        self._swap_memory = swap_memory
        self._graphs: DecodeGraphs | None = None
        self._compiled: CompiledStep | None = None
        if model.recipe is not None:
            self._compiled = CompiledStep(model.recipe, model.heads, memory, model.vocab_size)
        self._blocks_summed_together = ops.blocks_summed_together(memory.device, memory.shape.block_size)

    def move_blocks(self, schedule: Schedule) -> None:
        """Copy blocks to and from host memory, then copy shared blocks that are about to be written."""
        if self._swap_memory is not None:
            self.memory.copy_out(self._swap_memory, schedule.swap_out)
            self.memory.copy_in(self._swap_memory, schedule.swap_in)
        self.memory.copy_within(schedule.copies)

    def prepare(self, scheduled: list[ScheduledSequence]) -> StepTensors:
        """Return the new tokens of all sequences, packed into tensors on the host."""
        block_size = self.memory.shape.block_size
        num_new = np.array([s.num_scheduled_tokens for s in scheduled], dtype=np.int32)
        computed = np.array([s.sequence.num_computed_tokens for s in scheduled], dtype=np.int32)
        starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(num_new, out=starts[1:])
        # Position of each packed token: its sequence's computed tokens, plus its index among the new ones.
        owner = np.repeat(np.arange(len(scheduled)), num_new)
        positions = np.arange(starts[-1], dtype=np.int64) + (computed - starts[:-1])[owner]
        tables, num_left_out = self._held_tables([s.sequence for s in scheduled])
        # Logits are needed after each sequence's last token and after each of its draft tokens.
        num_sampled_rows = np.array([s.num_sampled_rows for s in scheduled], dtype=np.int64)
        ends = np.cumsum(num_sampled_rows)
        rows_to_sample = np.arange(ends[-1]) + np.repeat(starts[1:] - ends, num_sampled_rows)
        token_ids: list[int] = []
        rows_to_score: list[np.ndarray] = []
        for row, (sequence, num_tokens) in enumerate(scheduled):
            first = sequence.num_computed_tokens
            token_ids += sequence.token_ids[first : first + num_tokens] + sequence.draft_token_ids
            if scored := sequence.positions_to_score(num_tokens):
                rows_to_score.append(starts[row] + np.arange(scored.start - first, scored.stop - first))
        indices = positions - num_left_out[owner]
        slots = tables[owner, indices // block_size].astype(np.int64) * block_size + indices % block_size
        metadata = AttentionMetadata(
            block_tables=torch.from_numpy(tables),
            query_starts=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(computed + num_new - num_left_out),
            slot_mapping=torch.from_numpy(slots),
            max_new_tokens=int(num_new.max()),
        )
        logit_rows = np.concatenate([rows_to_sample, *rows_to_score], dtype=np.int64)
        return StepTensors(
            torch.tensor(token_ids), torch.from_numpy(positions), torch.from_numpy(logit_rows), metadata
        )

    def _held_tables(self, sequences: list[Sequence]) -> tuple[Tables, Tables]:
        """Return the tables of the blocks that the sequences hold, and how many tokens they leave out.

        Freed blocks are left out, since attention with a window depends only on distances. What the kernels
        call a sequence's length is thus the number of tokens in its remaining blocks.

        Returns:
            Block tables ``[num_sequences, max_blocks]``, padded with 0, and numbers of tokens
            ``[num_sequences]``.
        """
        num_hidden = [self._num_hidden_blocks(s) for s in sequences]
        held = [[0] * n + s.held_blocks for n, s in zip(num_hidden, sequences, strict=True)]
        tables = np.zeros((len(sequences), max(map(len, held))), dtype=np.int32)
        for row, block_ids in enumerate(held):
            tables[row, : len(block_ids)] = block_ids
        num_dropped = np.array([s.num_dropped_blocks for s in sequences], dtype=np.int32)
        return tables, (num_dropped - np.array(num_hidden, dtype=np.int32)) * self.memory.shape.block_size

    def _num_hidden_blocks(self, sequence: Sequence) -> int:
        """Return how many dummy blocks to list before the first held one.

        They align the table, so that the kernel's sums begin at the same blocks as if no block had been
        freed. The window hides them, so their content is never used.
        """
        if self.model.window is None:
            return 0
        return sequence.num_dropped_blocks % self._blocks_summed_together

    @torch.inference_mode()
    def capture_decode_steps(self, capture: Capture, max_num_seqs: int, max_model_len: int) -> None:
        """Capture CUDA graphs, which then run the steps that only decode.

        Args:
            capture: captures a function.
            max_num_seqs: most sequences in a step.
            max_model_len: most tokens of a sequence.

        Raises:
            RuntimeError: the model does something that a graph cannot capture, such as reading a value on the
                host.
        """
        max_blocks = -(-max_model_len // self.memory.shape.block_size)
        self._graphs = DecodeGraphs(self._run, capture, max_num_seqs, max_blocks, self.memory.device)

    @torch.inference_mode()
    def forward(self, step: StepTensors) -> torch.Tensor:
        """Return logits ``[num_sequences + num_draft_tokens + num_scored, vocab_size]``.

        For each sequence there is a row after its last token, followed by one row after each of its draft
        tokens. After the rows of all sequences come those of ``Sequence.positions_to_score``.
        """
        if self._compiled is not None:
            return self._compiled.run(step)
        if self._graphs is not None and self._graphs.fits(step):
            logits = self._graphs.run(step)
        else:
            logits = self._run(step.to(self.memory.device))
        if self.memory.device.type == "cuda":
            # After a step, transfers read its blocks on other streams.
            torch.cuda.current_stream().synchronize()
        return logits

    def _run(self, step: StepTensors) -> torch.Tensor:
        output = self.model.module(
            input_ids=step.input_ids[None],
            position_ids=step.positions[None],
            logits_to_keep=step.logit_rows,
            use_cache=False,
            paged_step=PagedStep(step.metadata, self.memory.layers, self.memory.scales),
        )
        logits: torch.Tensor = output.logits[0]
        return logits
