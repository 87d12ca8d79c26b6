"""The groups of one engine in the order of arrival; ``fair_blocks.py`` orders those of several clients.

A group counts as arrived when it did, plus its patience: requests of a high priority or with a near deadline
come before others that arrived somewhat earlier, and before no others. So none is overtaken for ever.

::

    add_waiting ───────────────────────────────────► waiting ──start_group───► running
                                                        ▲    ◄─suspend_group──
    add_transfer ──► transfers ──(blocks are written)───┘
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Mapping
from time import perf_counter

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.scheduling.sequence_group import NOT_ARRIVED, Arrival, SequenceGroup

OnOutcome = Callable[[bool], None]
"""Called with True when a transfer gets its blocks, with False when it ends without them."""

WATERMARK = 0.01
"""Share of the pool that new groups leave free for running groups, as in vLLM."""


class GroupQueues:
    """Groups that run, that wait to run, or that wait for blocks in which another worker will write.

    Args:
        clock: returns seconds.

    Attributes:
        running: groups that the next step computes, in the order of arrival.
        waiting: new or preempted groups to compute here, in the order of arrival.
        transfers: groups that lack blocks and whose prompts other workers compute, in the order of arrival.
        granted: how many blocks each transfer got for what is still being written in them.
        num_waiting_tokens: how many tokens of each client waited when their groups were queued.
        num_owed_blocks: how many blocks other clients leave to a client whose next group waits for a sequence
            in a step, and not for blocks.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = perf_counter) -> None:
        self.running: list[SequenceGroup] = []
        self.waiting: deque[SequenceGroup] = deque()
        self.transfers: dict[SequenceGroup, OnOutcome] = {}
        self.granted: dict[SequenceGroup, int] = {}
        self.num_waiting_tokens: Counter[str] = Counter()
        self.num_owed_blocks: dict[str, int] = {}
        self._num_by_client: Counter[str] = Counter()
        self._num_tokens_when_queued: dict[SequenceGroup, int] = {}
        self._with_blocks: set[SequenceGroup] = set()
        """Waiting groups that hold blocks, or held some when they were recorded.

        They are far fewer than all waiting groups.
        """
        self._pool = pool
        self._clock = clock
        self._num_watermark_blocks = math.ceil(WATERMARK * pool.num_blocks)
        self._num_arrived = 0

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self.running and not self.waiting

    @property
    def num_spare_blocks(self) -> int:
        """Blocks that a group without blocks may take.

        While groups run, some blocks are reserved for their growth.
        """
        num_owed = sum(self.num_owed_blocks.values()) if self.running and self.waiting else 0
        return self.num_blocks_above_watermark - num_owed

    @property
    def num_blocks_above_watermark(self) -> int:
        """Blocks that are not reserved for the growth of running groups; all if no group runs."""
        return self._pool.num_allocatable - (self._num_watermark_blocks if self.running else 0)

    @property
    def clients(self) -> Mapping[str, int]:
        """How many groups of each client run or wait."""
        return self._num_by_client

    def add_waiting(self, group: SequenceGroup) -> None:
        """Queue a new group, or one whose blocks were computed elsewhere and are in its table.

        A transfer keeps its position in the order, so it may overtake transfers that were complete before.
        """
        self._stamp_arrival(group)
        self.granted.pop(group, None)
        insort(self.waiting, group, key=_arrival)
        self._num_by_client[group.client] += 1
        self._num_tokens_when_queued[group] = group.num_uncomputed_tokens
        self.num_waiting_tokens[group.client] += group.num_uncomputed_tokens
        self.note_blocks(group)

    def note_blocks(self, group: SequenceGroup) -> None:
        """Record whether a waiting group has blocks; call this after blocks were allocated to it."""
        if group.holds_blocks:
            self._with_blocks.add(group)
        else:
            self._with_blocks.discard(group)

    def waiting_with_blocks(self) -> list[SequenceGroup]:
        """Return the waiting groups that hold blocks, in the order of arrival."""
        return sorted((group for group in self._with_blocks if group.holds_blocks), key=_arrival)

    def add_transfer(self, group: SequenceGroup, on_outcome: OnOutcome) -> None:
        """Queue a group for the blocks that it lacks; ``on_outcome`` is called when it gets them or ends."""
        self._stamp_arrival(group)
        self.transfers[group] = on_outcome
        self.transfers = {each: self.transfers[each] for each in sorted(self.transfers, key=_arrival)}

    def grant(self, group: SequenceGroup, num_blocks: int) -> None:
        """Move a transfer that got blocks to those whose blocks are being written."""
        self.granted[group] = num_blocks
        self.transfers.pop(group)(True)

    def start_group(self, group: SequenceGroup) -> None:
        """Move a waiting group to the running groups."""
        self._leave_waiting(group)
        insort(self.running, group, key=_arrival)

    def suspend_group(self, group: SequenceGroup) -> None:
        """Move a running group to the waiting groups; do nothing if it is waiting already."""
        if group in self.running:
            self.running.remove(group)
            self._count_out(group)
            self.add_waiting(group)

    def remove_group(self, group: SequenceGroup) -> None:
        """Remove a group from ``running``, ``waiting`` or ``granted``, if it is in one of them."""
        self.granted.pop(group, None)
        if group in self.running:
            self.running.remove(group)
            self._count_out(group)
        elif group in self.waiting:
            self._leave_waiting(group)
            self._count_out(group)

    def _leave_waiting(self, group: SequenceGroup) -> None:
        self.waiting.remove(group)
        self._with_blocks.discard(group)
        self.num_waiting_tokens[group.client] -= self._num_tokens_when_queued.pop(group)
        if not self.num_waiting_tokens[group.client]:
            del self.num_waiting_tokens[group.client]

    def _count_out(self, group: SequenceGroup) -> None:
        self._num_by_client[group.client] -= 1
        if not self._num_by_client[group.client]:
            del self._num_by_client[group.client]

    def _stamp_arrival(self, group: SequenceGroup) -> None:
        """Give a group its position in the order of arrival, unless it has one."""
        if group.arrival == NOT_ARRIVED:
            self._num_arrived += 1
            group.arrival = Arrival(self._clock() + group.prompt.patience, self._num_arrived)


def _arrival(group: SequenceGroup) -> Arrival:
    return group.arrival
