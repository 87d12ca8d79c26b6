"""Runs the model over one step's tokens, which are packed without padding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.decode_graphs import Capture, DecodeGraphs
from quire.engine.model.layers.attention import PagedStep
from quire.engine.model.program.compiled_step import CompiledStep
from quire.engine.model.states import States
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.decode_batch import DecodeBatch, row_adapters
from quire.engine.runner.step_tables import Int32s, StepTables
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import ScheduledSequence, Sequence
from quire.engine.weights.loader import LoadedModel
from quire.kernels import ops
from quire.kernels.metadata import AttentionMetadata

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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
        states = model.heads.states
        self._states = None if states is None else States(memory, states)
        self._hidden = torch.empty(0)
        self._graphs: DecodeGraphs | None = None
        self._compiled: CompiledStep | None = None
        if model.recipe is not None:
            self._compiled = CompiledStep(
                model.recipe,
                model.heads,
                memory,
                model.vocab_size,
                model.max_position_embeddings,
                model.collectives,
            )
        block_size = memory.shape.block_size
        alignment = 1 if model.window is None else ops.blocks_summed_together(memory.device, block_size)
        self._tables = StepTables(block_size, alignment, memory.frame_tables)
        self._decodes = DecodeBatch([], self._tables, block_size)

    def move_blocks(self, schedule: Schedule) -> None:
        """Copy blocks to and from host memory, then copy shared blocks that are about to be written."""
        if self._swap_memory is not None:
            self.memory.copy_out(self._swap_memory, schedule.swap_out)
            self.memory.copy_in(self._swap_memory, schedule.swap_in)
        self.memory.copy_within(schedule.copies)

    def prepare(self, scheduled: list[ScheduledSequence]) -> StepTensors:
        """Return the new tokens of all sequences, packed into tensors on the host.

        They are valid until the next call.
        """
        block_size = self.memory.shape.block_size
        if self._decodes.has(scheduled):
            return self._decodes.next_step()
        if DecodeBatch.fits(scheduled):
            self._decodes = DecodeBatch(scheduled, self._tables, block_size)
            return self._decodes.next_step()
        sequences = [each.sequence for each in scheduled]
        num_new = np.array([each.num_scheduled_tokens for each in scheduled], dtype=np.int32)
        computed = np.array([sequence.num_computed_tokens for sequence in sequences], dtype=np.int32)
        packed = _pack(scheduled, num_new, computed)
        tables, num_left_out = self._tables.of(sequences)
        indices = packed.positions - num_left_out[packed.owners]
        slots = (
            tables[..., packed.owners, indices // block_size] * np.int64(block_size) + indices % block_size
        )
        metadata = AttentionMetadata(
            block_tables=torch.from_numpy(tables),
            query_starts=torch.from_numpy(packed.starts),
            seq_lens=torch.from_numpy(computed + num_new - num_left_out),
            slot_mapping=torch.from_numpy(slots).contiguous(),
            max_new_tokens=int(num_new.max()),
        )
        scored = _prompt_rows(scheduled, packed, Sequence.positions_to_score)
        pooled = _prompt_rows(scheduled, packed, Sequence.positions_to_pool)
        return StepTensors(
            torch.from_numpy(packed.token_ids),
            torch.from_numpy(packed.positions),
            torch.from_numpy(np.concatenate([packed.rows_to_sample, *scored, *pooled], dtype=np.int64)),
            metadata,
            sum(map(len, pooled)),
            row_adapters(scheduled),
        )

    @torch.inference_mode()
    def capture_decode_steps(self, capture: Capture, max_num_seqs: int, max_model_len: int) -> None:
        """Capture CUDA graphs, which then run the steps that only decode.

        Args:
            capture: captures a function.
            max_num_seqs: most sequences in a step.
            max_model_len: most tokens of a sequence.

        Raises:
            RuntimeError: the model does something that a graph cannot capture, such as copying a value to the
                host.
        """
        max_blocks = -(-max_model_len // self.memory.shape.block_size)
        num_frames = self.memory.shape.num_frames
        self._graphs = DecodeGraphs(
            self._run, capture, max_num_seqs, max_blocks, self.memory.device, num_frames
        )

    def forward(self, step: StepTensors) -> torch.Tensor:
        """Return logits ``[num_sequences + num_draft_tokens + num_scored, vocab_size]``.

        For each sequence there is a row after its last token, followed by one row after each of its draft
        tokens. The rows of all sequences are followed by those of ``Sequence.positions_to_score``.
        """
        if self._compiled is not None:
            return self._compiled.run(step)
        with torch.inference_mode():
            if self._graphs is not None and self._graphs.fits(step):
                logits = self._graphs.run(step)
            else:
                logits = self._run(step.to(self.memory.device))
        if self.memory.device.type == "cuda":
            # Transfers read the step's blocks on other streams afterwards.
            torch.cuda.current_stream().synchronize()
        return logits

    def hidden_states(self, step: StepTensors) -> torch.Tensor | None:
        """Return ``[num_hidden, hidden_size]`` of the step that ``forward`` has just run; None without any.

        They are the states after the last norm, which the output layer gets, valid until the next step.
        """
        if not step.num_hidden:
            return None
        return self._hidden if self._compiled is None else self._compiled.hidden_states(step)

    def _run(self, step: StepTensors) -> torch.Tensor:
        output = self.model.module(
            input_ids=step.input_ids[None],
            position_ids=step.positions[None],
            logits_to_keep=step.logit_rows[: step.num_logits],
            output_hidden_states=step.num_hidden > 0,
            use_cache=False,
            paged_step=PagedStep(
                step.metadata,
                self.memory.layers,
                self.memory.scales,
                count(),
                self.memory.frames,
                self._states,
            ),
        )
        if step.num_hidden:
            self._hidden = output.hidden_states[-1][0, step.logit_rows[step.num_logits :]]
        logits: torch.Tensor = output.logits[0]
        return logits


class _PackedTokens(NamedTuple):
    """The new tokens of a step.

    Attributes:
        starts: ``[num_sequences + 1]``, the index of each sequence's first token, followed by ``num_tokens``.
        token_ids: ``[num_tokens]``.
        owners: ``[num_tokens]``, the index of each token's sequence.
        positions: ``[num_tokens]``, in the sequences.
        rows_to_sample: the indices of the last token of each sequence and of each draft token.
    """

    starts: Int32s
    token_ids: Int64s
    owners: Int64s
    positions: Int64s
    rows_to_sample: Int64s


def _pack(scheduled: list[ScheduledSequence], num_new: Int32s, computed: Int32s) -> _PackedTokens:
    """Pack any step, given each sequence's numbers of new tokens and of computed tokens."""
    token_ids: list[int] = []
    for sequence, num_tokens in scheduled:
        first = sequence.num_computed_tokens
        token_ids += sequence.token_ids[first : first + num_tokens]
        token_ids += sequence.draft_token_ids
    # Position of each packed token: its sequence's computed tokens, plus its index among the new ones.
    starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
    np.cumsum(num_new, out=starts[1:])
    owners = np.repeat(np.arange(len(scheduled)), num_new)
    positions = np.arange(starts[-1], dtype=np.int64) + (computed - starts[:-1])[owners]
    num_sampled_rows = np.array([each.num_sampled_rows for each in scheduled], dtype=np.int64)
    ends = np.cumsum(num_sampled_rows)
    rows_to_sample = np.arange(ends[-1]) + np.repeat(starts[1:] - ends, num_sampled_rows)
    return _PackedTokens(starts, np.array(token_ids, dtype=np.int64), owners, positions, rows_to_sample)


def _prompt_rows(
    scheduled: list[ScheduledSequence], packed: _PackedTokens, positions_of: Callable[[Sequence, int], range]
) -> list[Int64s]:
    """Return the rows of those positions of each sequence that a function chooses from its new tokens."""
    return [
        packed.starts[row] + np.arange(chosen.start, chosen.stop) - sequence.num_computed_tokens
        for row, (sequence, num_tokens) in enumerate(scheduled)
        if (chosen := positions_of(sequence, num_tokens))
    ]
