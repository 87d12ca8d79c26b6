"""The queues keep the order of arrival, moved by patience, whatever happens to the groups."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import SequenceGroup
from tests.testing.tiny_engine import make_request


def make_group(name: str = "r", patience: float = 0.0) -> SequenceGroup:
    prompt = make_request(name, [5, 6])
    prompt.patience = patience
    return SequenceGroup(prompt, [prompt])


class GroupQueuesMachine(RuleBasedStateMachine):
    """Groups arrive, run, are suspended and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queues = GroupQueues(BlockPool(8), lambda: self.now)
        self.groups: list[SequenceGroup] = []
        """The groups in their order, those that have left included."""
        self.due: list[float] = []
        """When each of them arrived, plus its patience."""

    def draw(self, data: st.DataObject, groups: list[SequenceGroup]) -> SequenceGroup | None:
        return data.draw(st.sampled_from(groups)) if groups else None

    @rule(is_transfer=st.booleans(), seconds=st.integers(0, 10), patience=st.sampled_from([0.0, -20.0, 5.0]))
    def arrive(self, is_transfer: bool, seconds: int, patience: float) -> None:
        group = make_group(str(len(self.groups)), patience)
        self.now += seconds
        place = bisect_right(self.due, self.now + patience)
        self.due.insert(place, self.now + patience)
        self.groups.insert(place, group)
        if is_transfer:
            self.queues.add_transfer(group, lambda is_granted: None)
        else:
            self.queues.add_waiting(group)

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        """Let any transfer have its blocks: it waits at the position of its arrival."""
        if (group := self.draw(data, list(self.queues.transfers))) is not None:
            del self.queues.transfers[group]
            self.queues.add_waiting(group)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if (group := self.draw(data, list(self.queues.waiting))) is not None:
            self.queues.start_group(group)
            assert group in self.queues.running

    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        groups = [*self.queues.waiting, *self.queues.running]
        if (group := self.draw(data, groups)) is not None:
            self.queues.suspend_group(group)
            assert group in self.queues.waiting

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if (group := self.draw(data, self.groups)) is not None:
            self.queues.remove_group(group)
            assert group not in self.queues.running
            assert group not in self.queues.waiting

    @invariant()
    def queues_are_in_the_order_of_arrival(self) -> None:
        position = {group: index for index, group in enumerate(self.groups)}
        for queue in (self.queues.running, self.queues.waiting, self.queues.transfers):
            order = [position[group] for group in queue]
            assert order == sorted(order)

    @invariant()
    def a_group_is_in_one_queue_at_most(self) -> None:
        queued = [*self.queues.running, *self.queues.waiting, *self.queues.transfers]
        assert len(queued) == len(set(queued))
        assert self.queues.is_idle == (not self.queues.running and not self.queues.waiting)

    @invariant()
    def the_tokens_that_wait_are_counted(self) -> None:
        counted = Counter[str]()
        for group in self.queues.waiting:
            counted[group.client] += group.num_uncomputed_tokens
        assert self.queues.num_waiting_tokens == counted


TestGroupQueues = GroupQueuesMachine.TestCase
TestGroupQueues.settings = settings(max_examples=30, stateful_step_count=30)


@pytest.mark.parametrize(("num_blocks", "num_kept"), [(8, 1), (100, 1), (101, 2), (1000, 10)])
def test_a_hundredth_of_the_pool_is_kept_for_the_growth_of_running_groups(
    num_blocks: int, num_kept: int
) -> None:
    queues = GroupQueues(BlockPool(num_blocks))
    group = make_group()
    queues.add_waiting(group)
    assert queues.num_spare_blocks == num_blocks
    queues.start_group(group)
    assert queues.num_spare_blocks == num_blocks - num_kept
