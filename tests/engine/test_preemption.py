"""Preemption: who gives up blocks, how they come back, and that the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.swap_space import SwapSpace
from quire.engine.scheduling.fair_blocks import FairBlocks
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.preemption import Preemption
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.scheduling.swapping import Swapping
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams
from tests.testing.tiny_engine import BLOCK_SIZE, make_engine, make_prompt, make_request, run


@pytest.mark.parametrize("is_swapped", [True, False, None])
def test_preempted_groups_give_the_same_tokens(
    load: Callable[[str], LoadedModel], is_swapped: bool | None
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("samples", {"n": 4, "seed": 5}),
        ("greedy", {"temperature": 0.0}),
        ("beams", {"beam": BeamParams(3)}),
        ("more", {"n": 2, "seed": 9}),
    ]

    def make() -> list[Sequence]:
        return [
            make_request(name, make_prompt(50, index), **params)
            for index, (name, params) in enumerate(requests)
        ]

    expected = run(make_engine(load("llama")), *make())
    engine = make_engine(load("llama"), num_blocks=26, num_swap_blocks=40, prefers_swap=is_swapped)
    assert run(engine, *make()) == expected
    assert engine.preemption.num_preempted > 0
    if is_swapped is not None:
        assert engine.preemption.counts[not is_swapped] == engine.preemption.num_preempted


def test_a_beam_without_blocks_does_not_wait_for_a_swapped_one_for_ever(
    load: Callable[[str], LoadedModel],
) -> None:
    engine = make_engine(load("llama"), num_blocks=16, num_swap_blocks=3, prefers_swap=True)
    searches = [(5, 3, 60), (26, 3, 20), (17, 2, 40), (9, 2, 20), (37, 2, 60)]
    for index, (length, width, most) in enumerate(searches):
        prompt = make_prompt(length, index)
        engine.add_request(make_request(str(index), prompt, beam=BeamParams(width), max_tokens=most))
    num_idle = 0
    while not engine.is_idle:
        engine.step()
        num_idle = 0 if engine.num_stepped else num_idle + 1
        assert num_idle < 10
    engine.check_conservation()


def test_an_aborted_group_frees_all_blocks(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), num_blocks=30, num_swap_blocks=30, prefers_swap=True)
    for index in range(4):
        engine.add_request(make_request(str(index), make_prompt(60, index), n=3))
    while not engine.preemption.counts.swapped:
        engine.step()
    for index in range(4):
        engine.abort(str(index))
        engine.check_conservation()
    assert engine.is_idle
    assert engine.pool.counts.used == 0
    assert engine.swap_space.num_free == 30


# --- without an engine --------------------------------------------------------------------------------------


class Ledger:
    """Queues and tables of a pool of eight blocks, with preemption."""

    def __init__(self, num_host_blocks: int = 8, *, prefers_swap: bool = True) -> None:
        self.pool = BlockPool(8)
        self.tables = BlockTables(self.pool, BLOCK_SIZE)
        self.queues = GroupQueues(self.pool)
        self.swap_space = SwapSpace(num_host_blocks)
        self.swapping = Swapping(self.queues, self.tables, self.swap_space)
        self.preemption = Preemption(
            self.queues, self.tables, self.swapping, lambda num_tokens, num_blocks: prefers_swap
        )
        self.fair_blocks = FairBlocks(self.queues, self.tables)
        self.schedule = Schedule()

    def run_group(self, name: str, num_blocks: int, **fields: bool) -> SequenceGroup:
        """Return a running group whose first sequence is computed, in this many blocks."""
        sequence = make_request(name, make_prompt(num_blocks * BLOCK_SIZE))
        sequence.stops_after_prefill = fields.get("stops_after_prefill", False)
        self.tables.reserve(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        group = SequenceGroup(sequence, [sequence])
        self.queues.add_waiting(group)
        self.queues.start_group(group)
        return group


def test_the_newest_group_is_the_victim_unless_a_transfer_may_read_its_blocks() -> None:
    ledger = Ledger()
    assert ledger.fair_blocks.last_victim() is None
    old, new = ledger.run_group("old", 1), ledger.run_group("new", 1)
    ledger.run_group("prefill", 1, stops_after_prefill=True)
    assert ledger.fair_blocks.last_victim() is new
    ledger.preemption.preempt(new, ledger.schedule)
    assert ledger.fair_blocks.last_victim() is old


def test_a_swapped_group_shares_its_blocks_again() -> None:
    ledger = Ledger()
    group = ledger.run_group("r", 2)
    group.sequences.append(ledger.tables.fork(group.prompt, 1))
    first, second = group.prompt.block_table
    ledger.preemption.preempt(group, ledger.schedule)
    assert ledger.schedule.swap_out == [(first, 0), (second, 1)]
    assert ledger.preemption.counts == (1, 0)
    assert list(ledger.queues.waiting) == [group]
    assert group.prompt.status == SequenceStatus.PREEMPTED
    assert ledger.pool.counts.used == 0
    assert ledger.swapping.swap_in(group, ledger.schedule, lambda group: 0)
    tables = [sequence.block_table for sequence in group.sequences]
    assert tables[0] == tables[1]
    assert [ledger.pool.ref_cnt(block_id) for block_id in tables[0]] == [2, 2]
    assert ledger.schedule.swap_in == [(0, tables[0][0]), (1, tables[0][1])]
    # The host blocks are free once the step has copied them.
    assert ledger.swap_space.num_free == 6
    ledger.swap_space.end_step()
    assert ledger.swap_space.num_free == 8


def test_a_group_stays_in_host_memory_until_its_next_tokens_fit_too() -> None:
    ledger = Ledger()
    group = ledger.run_group("r", 2)
    ledger.preemption.preempt(group, ledger.schedule)
    assert not ledger.swapping.swap_in(group, ledger.schedule, lambda group: 7)
    assert group.swapped is not None
    assert ledger.pool.counts.used == 0
    assert not ledger.schedule.swap_in
    other = ledger.run_group("other", 6)
    # While another group runs, one block is kept for its growth.
    assert not ledger.swapping.swap_in(group, ledger.schedule, lambda group: 0)
    ledger.tables.free(other.prompt)
    assert ledger.swapping.swap_in(group, ledger.schedule, lambda group: 5)


@pytest.mark.parametrize(
    ("num_host_blocks", "prefers_swap", "is_swapped"), [(8, True, True), (8, False, False), (1, True, False)]
)
def test_blocks_are_swapped_or_recomputed(num_host_blocks: int, prefers_swap: bool, is_swapped: bool) -> None:
    ledger = Ledger(num_host_blocks, prefers_swap=prefers_swap)
    group = ledger.run_group("r", 2)
    group.prompt.draft_token_ids = [5]
    ledger.preemption.preempt(group, ledger.schedule)
    assert ledger.preemption.counts == ((1, 0) if is_swapped else (0, 1))
    assert group.prompt.num_computed_tokens == (2 * BLOCK_SIZE if is_swapped else 0)
    assert bool(ledger.schedule.swap_out) == (group.swapped is not None) == is_swapped
    assert not group.prompt.block_table
    assert not group.prompt.draft_token_ids
