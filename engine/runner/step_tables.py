"""The block tables of a step as one array. Each step changes only new entries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.engine.sequences.sequence import Sequence

Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class HeldTables(NamedTuple):
    """The blocks that the sequences of a step hold.

    Freed blocks are left out, since attention with a window depends only on distances. The kernels therefore
    get the number of tokens in the remaining blocks as a sequence's length.

    Attributes:
        block_ids: ``[num_sequences, max_blocks]``; the entries after a sequence's last block are meaningless.
            If blocks have two parts, ``[num_frames, num_sequences, max_blocks]``, and the entries are frames.
            Those of frames that no token sees any more are meaningless too.
        num_left_out: ``[num_sequences]``, how many tokens of each sequence were in freed blocks.
    """

    block_ids: Int32s
    num_left_out: Int32s


class StepTables:
    """Keeps the tables of the last step, and copies from the sequences' lists only what has changed.

    The row of a sequence whose window has passed three blocks, with an alignment of two blocks::

        block_table    [ -  -  -  7  2  9 ]     three blocks were freed
        row            [       0  7  2  9 ]     one dummy block, so that two are left out
        num_left_out     2 blocks = 8 tokens of a block size of 4

    Args:
        block_size: tokens per block.
        alignment: a row begins with dummy blocks so that the number of blocks left out is a multiple of this.
            The kernel's sums then begin at the same blocks as if no block had been freed. The window hides
            the dummy blocks, so their content is never used. 1 means that there are none.
        frame_tables: the frames of each block, see ``KvMemory``; None if a block is one frame.
    """

    def __init__(self, block_size: int, alignment: int, frame_tables: Int32s | None = None) -> None:
        self._frame_tables = frame_tables
        num_frames = 1 if frame_tables is None else frame_tables.shape[1]
        self._block_size = block_size
        self._alignment = alignment
        self._sequences: list[Sequence] = []
        # For each row: the length of the sequence's table at the last update, and the number of its edits.
        self._lengths: list[int] = []
        self._edits: list[int] = []
        self._rows: Int32s = np.zeros((num_frames, 0, 64), dtype=np.int32)
        self._num_left_out: Int32s = np.zeros(0, dtype=np.int32)
        self._memory: Int32s = np.zeros(0, dtype=np.int32)
        self._packed: Int32s = np.zeros((0, 0), dtype=np.int32)
        self._num_tokens_left_out: Int32s = np.zeros(0, dtype=np.int32)

    def of(self, sequences: list[Sequence]) -> HeldTables:
        """Return the tables of these sequences, valid until the next call."""
        lengths = [len(sequence.block_table) for sequence in sequences]
        edits = [sequence.num_table_edits for sequence in sequences]
        if sequences != self._sequences:
            self._rearrange(sequences)
            self._update(lengths, edits)
        elif lengths != self._lengths or edits != self._edits:
            self._update(lengths, edits)
        return HeldTables(self._packed, self._num_tokens_left_out)

    def slots_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Return the shape of the slots of a step's tokens."""
        return (num_tokens,) if self._frame_tables is None else (len(self._rows), num_tokens)

    def _pack(self, width: int) -> Int32s:
        """Return the first entries of all rows, contiguous, in memory that the next update reuses."""
        num_entries = len(self._rows) * len(self._sequences) * width
        if num_entries > self._memory.size:
            # Memory is reused because the system clears new pages, which takes longer than the copy.
            self._memory = np.zeros(2 * num_entries, dtype=np.int32)
        packed = self._memory[:num_entries].reshape(len(self._rows), -1, width)
        packed[:] = self._rows[:, :, :width]
        return packed[0] if self._frame_tables is None else packed

    def _entries(self, block_ids: list[int]) -> list[int] | Int32s:
        """Return the entries of some blocks, with a row for each frame if there are several."""
        return block_ids if self._frame_tables is None else np.maximum(self._frame_tables[block_ids].T, 0)

    def _rearrange(self, sequences: list[Sequence]) -> None:
        """Give each sequence its previous row, or a new one."""
        known = {id(sequence): row for row, sequence in enumerate(self._sequences)}
        before = [known.get(id(sequence)) for sequence in sequences]
        kept = [row for row, old in enumerate(before) if old is not None]
        old_rows = [old for old in before if old is not None]
        num_frames, _, width = self._rows.shape
        rows = np.zeros((num_frames, len(sequences), width), dtype=np.int32)
        num_left_out = np.zeros(len(sequences), dtype=np.int32)
        rows[:, kept], num_left_out[kept] = self._rows[:, old_rows], self._num_left_out[old_rows]
        self._rows, self._num_left_out = rows, num_left_out
        self._lengths = [0 if old is None else self._lengths[old] for old in before]
        self._edits = [-1 if old is None else self._edits[old] for old in before]
        self._sequences = sequences

    def _update(self, lengths: list[int], edits: list[int]) -> None:
        """Copy the entries that are new, and the whole tables that were edited."""
        self._widen(max(lengths) + self._alignment)
        num_blocks = np.array(lengths, dtype=np.int32)
        is_changed = num_blocks != np.array(self._lengths, dtype=np.int32)
        if edits != self._edits:
            is_changed |= np.array(edits) != np.array(self._edits)
        changed: list[int] = np.flatnonzero(is_changed).tolist()
        for row in changed:
            sequence = self._sequences[row]
            if edits[row] != self._edits[row]:
                self._copy_whole(row, sequence)
            else:
                num_left_out = int(self._num_left_out[row])
                first, last = self._lengths[row] - num_left_out, lengths[row] - num_left_out
                self._rows[:, row, first:last] = self._entries(sequence.block_table[self._lengths[row] :])
        self._lengths, self._edits = lengths, edits
        self._packed = self._pack(int((num_blocks - self._num_left_out).max()))
        self._num_tokens_left_out = self._num_left_out * self._block_size

    def _copy_whole(self, row: int, sequence: Sequence) -> None:
        num_dummies = sequence.num_dropped_blocks % self._alignment
        block_ids = sequence.held_blocks
        self._rows[:, row, :num_dummies] = 0
        self._rows[:, row, num_dummies : num_dummies + len(block_ids)] = self._entries(block_ids)
        self._num_left_out[row] = sequence.num_dropped_blocks - num_dummies

    def _widen(self, num_entries: int) -> None:
        """Make room for tables of ``num_entries`` entries."""
        num_frames, num_rows, width = self._rows.shape
        if num_entries > width:
            rows = np.zeros((num_frames, num_rows, 1 << (num_entries - 1).bit_length()), dtype=np.int32)
            rows[:, :, :width] = self._rows
            self._rows = rows
