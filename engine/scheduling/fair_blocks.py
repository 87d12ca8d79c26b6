"""Divides the blocks of the pool among clients, so that a client that fills the pool delays only itself.

A client is an authenticated tenant. Its rank is the bit length of the number of its blocks, divided by its
weight. Groups of the lowest rank get blocks first, and groups of the highest rank are preempted first. Within
a rank, the order of arrival decides::

    client   a    b    c    d
    blocks   0    5    7    40
    rank     0    3    3    6      a waits for no other; b and c in the order of arrival; d is preempted first

Blocks that wait for another worker's writes cannot be preempted. So a client gets no more of these than it
leaves free, and a client that comes later finds some (dynamic thresholds: Choudhury and Hahne, 1998).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import Arrival, SequenceGroup
from quire.engine.sequences.block_tables import BlockTables

PREEMPTIONS_PER_RANK = 4
"""This many preemptions of a group lower its rank by one, as if its client had half as many blocks."""


class FairBlocks:
    """Decides the order in which groups get blocks, and which group is preempted for another.

    Prompts that are computed for another worker keep the order of arrival, since that worker waits for them
    in this order.

    Args:
        queues: the groups.
        tables: the ledger of their blocks.
    """

    def __init__(self, queues: GroupQueues, tables: BlockTables) -> None:
        self._queues = queues
        self._tables = tables
        self._num_held_by_client: Counter[str] = Counter()
        """Blocks of each client in the present step; empty while only the order of arrival counts."""

    def count_held_blocks(self) -> None:
        """Count the blocks of each client; the order depends on these counts until the next call."""
        queues = self._queues
        self._num_held_by_client.clear()
        transfers = (*queues.transfers, *queues.granted)
        clients = {*queues.clients, *[group.client for group in transfers]}
        if len(clients) > 1 and not any(group.prompt.stops_after_prefill for group in queues.waiting):
            for group in (*queues.running, *queues.waiting_with_blocks(), *transfers):
                self._num_held_by_client[group.client] += group.num_held_blocks

    def rank(self, group: SequenceGroup, num_more_blocks: int = 0) -> int:
        """Return the rank of a group, which rises with its client's blocks; 0 if there is only one client.

        Every ``PREEMPTIONS_PER_RANK`` preemptions lower it, so that no group is preempted forever.
        """
        if not self._num_held_by_client:
            return 0
        num_blocks = self._num_held_by_client[group.client] + num_more_blocks
        return (num_blocks // group.weight).bit_length() - group.num_preemptions // PREEMPTIONS_PER_RANK

    def position(self, group: SequenceGroup) -> tuple[int, Arrival]:
        """Return the position of a group in the order."""
        return self.rank(group), group.arrival

    def in_order(self, groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """Return groups in their order; they are given in the order of arrival."""
        return sorted(groups, key=self.rank) if self._num_held_by_client else list(groups)

    def next_transfers(self) -> list[SequenceGroup]:
        """Return the oldest transfer of each client that may get more blocks, in the order of arrival.

        One transfer is always allowed. Without authenticated tenants, there is no other client to leave
        blocks to.
        """
        if not self._queues.transfers:
            return []
        granted: Counter[str] = Counter()
        for group, num_blocks in self._queues.granted.items():
            granted[group.client] += num_blocks
        oldest: dict[str, SequenceGroup] = {}
        for group in self._queues.transfers:
            oldest.setdefault(group.client, group)

        def may_have_more(group: SequenceGroup) -> bool:
            num_granted, num_missing = granted[group.client], self._tables.num_missing(group.prompt)
            num_left = self._queues.num_spare_blocks - num_missing
            return not (group.client and num_granted) or num_granted + num_missing <= num_left

        return [group for group in oldest.values() if may_have_more(group)]

    def last_victim(self) -> SequenceGroup | None:
        """Return the last group in the order that can be preempted; None if there is none."""
        groups = (*self._queues.running, *self._queues.waiting_with_blocks())
        victims = (group for group in groups if group.is_preemptible)
        return max(victims, key=self.position, default=None)

    def victim_for(self, group: SequenceGroup) -> SequenceGroup | None:
        """Return the next group to preempt for ``group``; None if that has enough blocks, or holds more.

        Even with the blocks that it needs, ``group`` has a lower rank than the victim has now. The victim
        therefore cannot get its blocks back by preempting ``group``.
        """
        num_blocks = self._num_needed_blocks(group)
        if num_blocks <= self._queues.num_blocks_above_watermark:
            return None
        victim = self.last_victim()
        return victim if victim is not None and self.rank(victim) > self.rank(group, num_blocks) else None

    def next_without_blocks(self, has_room: Callable[[SequenceGroup], bool]) -> SequenceGroup | None:
        """Return the first group if it lacks only blocks and several clients share the pool.

        Args:
            has_room: returns whether the step has a sequence and a token for a group.
        """
        queues = self._queues
        if not self._num_held_by_client:
            return None
        waiting = (group for group in queues.waiting if not group.holds_blocks and not group.is_loading)
        transfers = self.next_transfers()
        group = min((*transfers, *waiting), key=self.position, default=None)
        if group is None or group in queues.transfers:
            return group
        oldest_transfer = next(iter(transfers), group)
        may_start = group.awaited is None and has_room(group)
        return group if may_start and group.arrival <= oldest_transfer.arrival else None

    def _num_needed_blocks(self, group: SequenceGroup) -> int:
        """Return how many blocks a group needs to begin or to continue; 0 if the number is unknown."""
        if group in self._queues.transfers:
            return self._tables.num_missing(group.prompt)
        if group.swapped is not None:
            return len(group.swapped.host_ids)
        return group.lack.num_blocks if group.lack is not None else 0
