"""Counts the token slots of a KV pool by use, with the causes of waste in the paper's figure 2."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from quire.benchmarks.paper.allocators import AdmissionPolicy
from quire.benchmarks.paper.workload import Request


class SlotUse(NamedTuple):
    """Token slots by use, or the sum over many steps.

    Attributes:
        states: slots with the keys and values of a token of a request that has not ended.
        reserved: slots that will contain a token before their request ends.
        internal: slots that are reserved for a request that will never use them.
        external: slots outside all reservations: free, or lost to the allocator's rounding.
    """

    states: int
    reserved: int
    internal: int
    external: int

    def plus(self, other: SlotUse) -> SlotUse:
        """Return the sums of each use."""
        return SlotUse(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def percent(self) -> tuple[float, ...]:
        """Each use as a share of all slots."""
        return tuple(100 * count / sum(self) for count in self)


def account(reservations: Iterable[tuple[int, int, int]], num_slots: int) -> SlotUse:
    """Sort a pool's slots by use.

    Args:
        reservations: for each request, the numbers of slots (reserved, with a token, that will ever have a
            token).
        num_slots: of the whole pool.
    """
    states = later = never = 0
    for num_reserved, num_cached, num_final in reservations:
        used = min(num_reserved, num_final)
        states += num_cached
        later += used - num_cached
        never += num_reserved - used
    return SlotUse(states, later, never, num_slots - states - later - never)


class Load(NamedTuple):
    """Sums, over the steps of a run, of the slots' uses and of the running requests."""

    use: SlotUse
    num_running: int
    num_steps: int

    @property
    def mean_running(self) -> float:
        """Requests in a step, on average."""
        return self.num_running / self.num_steps

    def after(self, use: SlotUse, num_running: int) -> Load:
        """Return the sums with one step more."""
        return Load(self.use.plus(use), self.num_running + num_running, self.num_steps + 1)


EMPTY = Load(SlotUse(0, 0, 0, 0), 0, 0)
"""The sums over no steps."""


def is_steady(num_ended: int, num_requests: int) -> bool:
    """Return whether a run in which all requests wait from the start has reached its steady state."""
    return num_ended >= num_requests / 4


def simulate(admission: AdmissionPolicy, requests: list[Request], num_slots: int) -> Load:
    """Run requests that all wait from the start; each step gives every placed request one token.

    Steps count from the end of the first quarter of the requests, while any request waits. A prompt takes one
    step. An ended request whose memory is not freed yet uses none of it.
    """
    waiting = deque(enumerate(requests))
    num_cached: dict[int, int] = {}
    load = EMPTY
    while True:
        while waiting and admission.place(*waiting[0]):
            index, request = waiting.popleft()
            num_cached[index] = request.num_input
        admission.close()
        if not waiting:
            return load
        kept = (
            (count, num_cached.get(index, 0), sum(requests[index]) if index in num_cached else 0)
            for index, count in admission.reserved.items()
        )
        num_ended = len(requests) - len(waiting) - len(num_cached)
        if is_steady(num_ended, len(requests)):
            load = load.after(account(kept, num_slots), len(num_cached))
        for index in list(num_cached):
            num_cached[index] += 1
            # The last token is sampled, but its keys and values are never computed.
            if num_cached[index] == sum(requests[index]):
                del num_cached[index]
                admission.finish(index)
