"""The allocators of the paper's baselines: a request gets one contiguous run of token slots before it begins.

Orca's three variants reserve slots for the whole output before it is known, with a buddy allocator (paper,
section 6.1): Max reserves for the longest sequence of the model, Pow2 for the true output rounded up to a
power of two, and Oracle for exactly the true output, which no real system knows. FasterTransformer forms a
static batch, reserves the longest sequence for each request, and begins the next batch when all have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from quire.benchmarks.paper.workload import Request


class BuddyAllocator:
    """Allocates runs of 2^k slots, which are split off larger runs and merged with their buddies when freed.

    The pool need not be a power of two: it is split into the powers of two of its binary digits.
    """

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {order: set() for order in range(num_slots.bit_length())}
        self._order_of: dict[int, int] = {}
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @property
    def num_free(self) -> int:
        """Number of slots outside all allocated runs."""
        return sum(len(starts) << order for order, starts in self._free.items())

    def allocate(self, num_slots: int) -> int | None:
        """Return the first slot of a free run of at least ``num_slots``; None if no run is that long."""
        order = (num_slots - 1).bit_length()
        found = next((o for o in sorted(self._free) if o >= order and self._free[o]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for smaller in reversed(range(order, found)):
            self._free[smaller].add(start + (1 << smaller))
        self._order_of[start] = order
        return start

    def free(self, start: int) -> None:
        """Free a run, and merge it with its buddy, and so on, as long as the buddy is free."""
        order = self._order_of.pop(start)
        # Runs are aligned to their length, since the pool is split from the largest power of two to the
        # smallest.
        while (buddy := start ^ (1 << order)) in self._free.get(order, ()):
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)


class AdmissionPolicy(Protocol):
    """Decides which requests may run together, by the memory that it reserves for them."""

    @property
    def reserved(self) -> Mapping[int, int]:
        """Slots that the policy keeps for each request, without the allocator's rounding."""

    def place(self, index: int, request: Request) -> bool:
        """Reserve memory for a request; return False if it has to wait."""

    def close(self) -> None:
        """Record that a step begins with the placed requests."""

    def finish(self, index: int) -> None:
        """Record that a request has ended."""


Reservation = Callable[[Request], int]


class Contiguous:
    """Orca's continuous batches: each request gets one run of a buddy allocator, and frees it at its end."""

    def __init__(self, num_slots: int, reservation: Reservation) -> None:
        self._buddies = BuddyAllocator(num_slots)
        self._reservation = reservation
        self._starts: dict[int, int] = {}
        self.reserved: dict[int, int] = {}

    def place(self, index: int, request: Request) -> bool:
        """Reserve a run; return False if no free run is long enough."""
        num_slots = self._reservation(request)
        start = self._buddies.allocate(num_slots)
        if start is None:
            return False
        self._starts[index] = start
        self.reserved[index] = num_slots
        return True

    def close(self) -> None:
        """Do nothing: requests join at every step."""

    def finish(self, index: int) -> None:
        """Free the run."""
        self._buddies.free(self._starts.pop(index))
        del self.reserved[index]


class StaticBatch:
    """Reserves the longest length for each request. None joins a running batch; all free memory together."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._batch_size = num_slots // max_length
        self._max_length = max_length
        self._num_left = 0
        self._is_closed = False
        self.reserved: dict[int, int] = {}

    def place(self, index: int, request: Request) -> bool:
        """Join the batch, unless it is full or runs already."""
        if self._is_closed or len(self.reserved) == self._batch_size:
            return False
        self.reserved[index] = self._max_length
        self._num_left += 1
        return True

    def close(self) -> None:
        """Begin to run the batch. No request joins it until all of its requests have ended."""
        self._is_closed = bool(self.reserved)

    def finish(self, index: int) -> None:
        """Record the end of a request; the last one frees the memory of all."""
        self._num_left -= 1
        if not self._num_left:
            self.reserved.clear()
            self._is_closed = False


def reserve_pow2(request: Request) -> int:
    """Return input tokens and the output tokens rounded up to a power of two."""
    return request.num_input + (1 << (request.num_output - 1).bit_length())


def reserve_oracle(request: Request) -> int:
    """Return the number of tokens that the request will really use."""
    return request.num_input + request.num_output


def baselines(num_slots: int, max_length: int) -> dict[str, AdmissionPolicy]:
    """Return the paper's baselines over a pool of ``num_slots`` token slots."""
    return {
        "FasterTransformer": StaticBatch(num_slots, max_length),
        "Orca (Max)": Contiguous(num_slots, lambda request: max_length),
        "Orca (Pow2)": Contiguous(num_slots, lambda request: min(reserve_pow2(request), max_length)),
        "Orca (Oracle)": Contiguous(num_slots, reserve_oracle),
    }
