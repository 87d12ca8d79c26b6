"""Parallel samples: the same tokens as one by one, over shared blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.beam_search import BeamExtension, BeamSearch
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams
from tests.testing.tiny_engine import BLOCK_SIZE, RecordingRunner, make_engine, make_prompt, make_request, run


@pytest.mark.parametrize("length", [1, 16, 40])
def test_each_of_eight_samples_is_what_its_seed_gives(
    load: Callable[[str], LoadedModel], length: int
) -> None:
    prompt = make_prompt(length)
    together = run(make_engine(load("llama")), make_request("r", prompt, n=8, seed=70))
    for index in range(8):
        single = run(make_engine(load("llama")), make_request("a", prompt, seed=70 + index))
        assert together["r", index] == single["a", 0]
    assert len({tuple(tokens) for tokens in together.values()}) == 8


def test_samples_share_the_prompt_and_copy_only_its_last_block(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), make_runner=RecordingRunner)
    assert isinstance(engine.runner, RecordingRunner)
    engine.add_request(make_request("r", make_prompt(100), n=8))
    while not engine.groups["r"].is_forked:
        engine.step()
    assert engine.pool.counts.used == 7
    engine.step()
    # Six full blocks for all, and the seventh once for each: the last owner keeps the original.
    assert engine.pool.counts.used == 6 + 8
    assert [len(schedule.copies) for schedule in engine.runner.schedules] == [7]


# --- without an engine --------------------------------------------------------------------------------------


def make_group(**params: Any) -> tuple[SequenceGroup, BlockTables]:
    """Return a group whose prompt of three blocks is computed, and the tables that hold it."""
    tables = BlockTables(BlockPool(16), BLOCK_SIZE)
    prompt = make_request("r", make_prompt(2 * BLOCK_SIZE + 1), **params)
    tables.reserve(prompt)
    prompt.num_computed_tokens = prompt.num_tokens
    return SequenceGroup(prompt, [prompt]), tables


def test_samples_are_forked_once_and_share_every_block() -> None:
    group, tables = make_group(n=3)
    assert group.num_slots == 3  # room for all samples is kept from the start
    samples = group.fork_samples(tables)
    assert group.fork_samples(tables) is samples
    assert [each.index for each in samples] == [0, 1, 2]
    assert [tables.pool.ref_cnt(block_id) for block_id in group.prompt.block_table] == [3, 3, 3]
    tables.free(samples.pop())
    assert group.num_slots == 2


def test_beams_without_a_kept_extension_free_their_blocks() -> None:
    group, tables = make_group(beam=BeamParams(2))
    group.beam = BeamSearch(BeamParams(2), 8, frozenset())
    group.extend_beams([BeamExtension(0, 7), BeamExtension(0, 8)], tables)
    first, second = group.sequences
    for beam in group.sequences:
        tables.append(beam, 1)
    assert tables.pool.counts.used == 3 + 1
    group.extend_beams([BeamExtension(1, 9)], tables)
    [beam] = group.sequences
    assert beam.token_ids[-2:] == [8, 9]
    assert first.block_table == second.block_table == []
    assert tables.pool.counts.used == len(beam.block_table) == 3
    # A search with few beams may have all of them again.
    assert group.num_slots == 2


def test_a_finished_prefill_is_not_preempted() -> None:
    group, tables = make_group()
    assert group.is_preemptible
    group.prompt.stops_after_prefill = True
    assert not group.is_preemptible
    group.prompt.stops_after_prefill = False
    tables.free(group.prompt)
    assert not group.is_preemptible
