"""The first blocks of a group: what it takes from the cache, from host memory, and from the pool."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.tiers import CacheTiers
from quire.engine.scheduling.first_blocks import FirstBlocks
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.kv_layout import KvShape
from tests.testing.tiny_engine import make_request

BLOCK_SIZE, NUM_BLOCKS = 4, 8
SHAPE = KvShape(1, 1, BLOCK_SIZE, 1, "float32")
CPU = torch.device("cpu")
PROMPT = list(range(100, 114))
"""Three full blocks and two tokens."""


class Ledger:
    """Queues and tables over a pool of eight blocks, and host memory for as many."""

    def __init__(self) -> None:
        memory = KvMemory(SHAPE, NUM_BLOCKS, CPU)
        self.tiers = CacheTiers(memory, HostCache(KvMemory(SHAPE, NUM_BLOCKS, CPU)))
        self.pool = BlockPool(NUM_BLOCKS, lower=self.tiers)
        self.tables = BlockTables(self.pool, BLOCK_SIZE, tiers=self.tiers)
        self.queues = GroupQueues(self.pool)
        self.first_blocks = FirstBlocks(self.queues, self.tables, self.tiers)

    def wait(self, name: str, token_ids: list[int]) -> SequenceGroup:
        prompt = make_request(name, token_ids)
        group = SequenceGroup(prompt, [prompt])
        self.queues.add_waiting(group)
        return group

    def run(self, name: str, token_ids: list[int]) -> Sequence:
        """Let a request run, and compute its prompt."""
        group = self.wait(name, token_ids)
        assert self.first_blocks.allocate_for(group, Schedule())
        self.queues.start_group(group)
        group.prompt.num_computed_tokens = group.prompt.num_tokens
        self.tables.seal(group.prompt)
        return group.prompt

    def end(self, sequence: Sequence) -> None:
        [group] = [each for each in self.queues.running if each.prompt is sequence]
        self.queues.remove_group(group)
        self.tables.free(sequence)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_a_cached_prefix_is_shared_and_its_last_token_is_computed(ledger: Ledger) -> None:
    first = ledger.run("first", PROMPT[:12])
    group = ledger.wait("again", PROMPT[:12])
    schedule = Schedule()
    assert ledger.first_blocks.allocate_for(group, schedule)
    assert group.prompt.block_table[:2] == first.block_table[:2]
    # The third block is copied for the three tokens before the last one, which has to be computed.
    assert schedule.copies == [(first.block_table[2], group.prompt.block_table[2])]
    assert schedule.pinned == [first.block_table[2]]
    assert group.prompt.num_computed_tokens == group.prompt.num_cached_tokens == 11


def test_a_group_that_lacks_blocks_allocates_none_and_returns_the_missing_number(ledger: Ledger) -> None:
    ledger.run("running", list(range(16)))
    cached = ledger.run("cached", PROMPT[:4])
    ledger.end(cached)
    group = ledger.wait("blocked", PROMPT)
    ledger.run("other", list(range(50, 54)))
    assert not ledger.first_blocks.allocate_for(group, Schedule())
    assert group.prompt.block_table == []
    assert group.prompt.num_computed_tokens == 0
    assert group.lack is not None
    assert group.lack.num_blocks == 4  # three new ones, and the cached one that nothing else holds
    assert group.lack.next_hash == [group.prompt.block_hashes[1]]
    assert ledger.pool.counts.used == 5


def test_a_running_group_keeps_room_to_grow(ledger: Ledger) -> None:
    ledger.run("running", list(range(16)))
    group = ledger.wait("blocked", list(range(50, 66)))
    assert not ledger.first_blocks.allocate_for(group, Schedule())
    [running] = ledger.queues.running
    ledger.queues.suspend_group(running)
    assert ledger.first_blocks.allocate_for(group, Schedule())


def test_a_block_that_a_running_sequence_will_seal_is_awaited(ledger: Ledger) -> None:
    running = ledger.wait("running", PROMPT[:8])
    assert ledger.first_blocks.allocate_for(running, Schedule())
    ledger.queues.start_group(running)
    group = ledger.wait("equal", PROMPT[:8])
    assert not ledger.first_blocks.allocate_for(group, Schedule())
    assert group.lack is None
    with patch.object(ledger.tables, "take_cached_prefix", side_effect=AssertionError("matched again")):
        assert not ledger.first_blocks.allocate_for(group, Schedule())
    running.prompt.num_computed_tokens = 8
    ledger.tables.seal(running.prompt)
    assert ledger.first_blocks.allocate_for(group, Schedule())
    assert group.prompt.num_cached_tokens == 7


def test_a_block_whose_sequence_ends_is_awaited_no_longer(ledger: Ledger) -> None:
    running = ledger.wait("running", PROMPT[:8])
    assert ledger.first_blocks.allocate_for(running, Schedule())
    ledger.queues.start_group(running)
    group = ledger.wait("equal", PROMPT[:8])
    assert not ledger.first_blocks.allocate_for(group, Schedule())
    ledger.queues.remove_group(running)
    ledger.tables.free(running.prompt)
    assert ledger.first_blocks.allocate_for(group, Schedule())
    assert group.prompt.num_cached_tokens == 0


def test_blocks_in_host_memory_are_restored_without_being_computed(ledger: Ledger) -> None:
    ledger.end(ledger.run("first", PROMPT))
    ledger.end(ledger.run("filler", list(range(32))))  # pushes the first prompt down
    assert len(ledger.tiers.host) == 3
    group, schedule = ledger.wait("again", PROMPT), Schedule()
    assert ledger.first_blocks.allocate_for(group, schedule)
    targets = [block_id for _, block_id in schedule.promotions]
    assert targets == group.prompt.block_table[:3]
    assert schedule.promoted == [(group.prompt, 3)]
    assert group.prompt.num_promoted_tokens == group.prompt.num_computed_tokens == 12
    assert group.prompt.num_sealed_blocks == 0  # the step seals them after the copy


def test_a_group_with_blocks_never_waits_for_the_disk(ledger: Ledger) -> None:
    group = ledger.wait("r", PROMPT)
    assert not ledger.first_blocks.is_loading(group)
    assert group.prefetch is not None
    group.prefetch.num_left = 1
    assert ledger.first_blocks.is_loading(group)
    assert ledger.first_blocks.allocate_for(group, Schedule())
    assert not ledger.first_blocks.is_loading(group)
