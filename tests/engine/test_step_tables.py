"""The array of tables that steps patch, against tables built from scratch, under random changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.runner.step_tables import StepTables
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, WINDOW = 4, 400, 10
PROMPTS = ([7] * 9, [7] * 4 + [8] * 30, [9] * 3)


class Ledger:
    """Sequences whose tables are changed in the ways in which an engine changes them."""

    def __init__(self, window: int | None) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables = BlockTables(self.pool, BLOCK_SIZE, window)
        self.sequences: list[Sequence] = []

    def start(self, which: int) -> None:
        """Start a sequence with its cached prefix and blocks for the rest of its prompt."""
        prompt = PROMPTS[which % len(PROMPTS)]
        sequence = Sequence("", prompt[:], len(prompt), SamplingParams(), b"root")
        self.tables.take_cached_prefix(sequence, len(prompt) - 1)
        self.tables.reserve(sequence)
        self.sequences.append(sequence)

    def compute(self, which: int) -> None:
        """Compute a sequence's tokens, which may replace blocks, then drop blocks and add a token."""
        if sequence := self._choose(which):
            self.tables.append(sequence, sequence.num_tokens - sequence.num_computed_tokens)
            sequence.num_computed_tokens = sequence.num_tokens
            self.tables.seal(sequence)
            self.tables.drop_unseen(sequence, sequence.num_computed_tokens)
            sequence.token_ids += [which] * (which % 9 + 1)

    def add_and_trim(self, which: int) -> None:
        """Give a sequence blocks for its tokens, and take back those without computed tokens."""
        if sequence := self._choose(which):
            self.tables.reserve(sequence)
            self.tables.trim(sequence)

    def fork(self, which: int) -> None:
        """Fork a sequence, whose last block is then shared."""
        if sequence := self._choose(which):
            self.sequences.insert(which % len(self.sequences), self.tables.fork(sequence, 1))

    def evict(self, which: int) -> None:
        """Drop a block from the middle of a table, as under a KV budget."""
        sequence = self._choose(which)
        num_full = sequence.num_computed_tokens // BLOCK_SIZE if sequence else 0
        if sequence and num_full and not sequence.num_dropped_blocks:
            self.tables.drop(sequence, [num_full // 2])

    def restart(self, which: int) -> None:
        """Take all blocks of a sequence, as a preemption does, and start it again."""
        if sequence := self._choose(which):
            self.tables.free(sequence)
            self.tables.take_cached_prefix(sequence, sequence.num_tokens - 1)
            self.tables.reserve(sequence)

    def end(self, which: int) -> None:
        """End a sequence."""
        if sequence := self._choose(which):
            self.tables.free(sequence)
            self.sequences.remove(sequence)

    def _choose(self, which: int) -> Sequence | None:
        return self.sequences[which % len(self.sequences)] if self.sequences else None


CHANGES = (
    "start",
    "start",
    "compute",
    "compute",
    "compute",
    "add_and_trim",
    "fork",
    "evict",
    "restart",
    "end",
)
a_change = st.tuples(st.sampled_from(CHANGES), st.integers(0, 20))
a_step = st.tuples(st.lists(a_change, max_size=4), st.integers(0, 2**12))


@pytest.mark.parametrize(("window", "alignment"), [(None, 1), (WINDOW, 1), (WINDOW, 4)])
@given(steps=st.lists(a_step, max_size=25))
def test_patched_tables_equal_tables_from_scratch(window: int | None, alignment: int, steps: Any) -> None:
    ledger, patched = Ledger(window), StepTables(BLOCK_SIZE, alignment)
    for changes, left_out in steps:
        for name, which in changes:
            if window is None or name != "evict":
                getattr(ledger, name)(which)
        # A step may leave sequences out, but only those with blocks can be in it.
        batch = [s for i, s in enumerate(ledger.sequences) if s.block_table and not left_out >> i & 1]
        if not batch:
            continue
        block_ids, num_left_out = patched.of(batch)
        for sequence, row, num_tokens in zip(batch, block_ids.tolist(), num_left_out, strict=True):
            num_dummies = sequence.num_dropped_blocks % alignment
            held = [block_id for block_id in sequence.block_table if block_id >= 0]
            assert row[num_dummies : num_dummies + len(held)] == held
            assert num_tokens == (sequence.num_dropped_blocks - num_dummies) * BLOCK_SIZE


def test_new_tables_do_not_change_what_is_no_longer_in_a_step() -> None:
    ledger, tables = Ledger(None), StepTables(BLOCK_SIZE, 1)
    ledger.start(0)
    ledger.start(1)
    first, second = ledger.sequences
    tables.of([first, second])
    ledger.compute(0)
    assert tables.of([second]).block_ids.tolist() == [second.block_table]
    assert tables.of([first]).block_ids.tolist() == [first.block_table]
