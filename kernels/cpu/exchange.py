"""Sums over processes of one machine, in memory that they share.

Each process writes its partial sums into its own slot, increments its counter, and waits for all others. Then
it reads all slots and adds them in a fixed binary tree, so each process gets the same bits. Rounds alternate
between two sets of slots. A process that has reached a round has read all slots of the previous round, so
these may be overwritten.

The leaves of the tree are segments of inputs. A process has consecutive segments. It adds segments that form
a whole subtree: such a sum is called a piece. Readers add the pieces. With 8 segments and 3 processes, for
example, the process with the segments 2, 3 and 4 writes the pieces 2 + 3 and 4. A process whose segments are
an aligned power of two has one piece.

With this method the processes wait for each other once. Recursive doubling adds in the same tree, but waits
``log2`` of the number of processes times.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.futex import sleep_while, wake
from quire.kernels.cpu.intrinsics import arrive, exact, keep_apart, pointer, raise_shared, read_shared
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.unit_product import MOST_SEGMENTS

MOST_RANKS = 8
MOST_PIECES = 4
"""Most pieces of up to 8 consecutive segments: the segments 1 to 6 are the pieces 1, 2 + 3, 4 + 5 and 6."""
_MOST_LEVELS = MOST_SEGMENTS.bit_length() - 1
SPINS = 10_000
"""How often a process checks the others' counters before it sleeps, if each process has a core."""

LINE = 64
"""Bytes from one process's counter to the next, so that each counter has its own cache line."""
_ASLEEP = 8
"""Bytes from a process's counter to the latest round for which other processes sleep at this counter."""

EXCHANGE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "rank",
            "num_ranks",
            "counters",
            "is_broken",
            "slots",
            "slot_bytes",
            "piece_bytes",
            "spins",
            "system_call",
            "futex",
            "patience",
        )
    ]
)
"""The memory of one process's exchanges.

``counters`` is the address of the rounds that each process has reached. ``is_broken`` is the address of a
counter that is above 0 if a process has failed. ``slots`` is the address of ``[2, num_ranks, slot_bytes]``,
and a slot has a piece every ``piece_bytes``. ``spins`` is how often a process checks the others' counters
before it sleeps. ``system_call`` and ``futex`` are explained at ``futex_call``. ``patience`` is the address
of the seconds and nanoseconds after which a sleeping process checks whether another one has failed.
"""


@exact
def come(exchange: Any) -> None:
    """Announce to the other processes that this one has reached its next round."""
    counter = exchange.counters + LINE * exchange.rank
    round_number = arrive(counter) + 1
    # A sleeper writes this before it compares the counter, so either it sees the new counter or this process
    # sees the sleeper.
    if read_shared(counter + _ASLEEP) >= round_number:
        wake(exchange.system_call, exchange.futex, counter)


@exact
def meet(exchange: Any, round_number: int) -> None:
    """Wait until all processes have reached a round, or one has failed.

    It sleeps after some checks, since the process for which it waits may need the core.
    """
    for rank in range(exchange.num_ranks):
        counter, spins = exchange.counters + LINE * rank, 0
        while True:
            seen = read_shared(counter)
            if seen >= round_number:
                break
            if read_shared(exchange.is_broken) > 0:
                return
            spins += 1
            if spins > exchange.spins:
                raise_shared(counter + _ASLEEP, round_number)
                sleep_while(exchange.system_call, exchange.futex, counter, seen, exchange.patience)


@exact
def slot(exchange: Any, round_number: int, rank: int) -> int:
    """Return the address of the slot of a process in a round."""
    number = (round_number & 1) * exchange.num_ranks + rank
    address: int = exchange.slots + number * exchange.slot_bytes
    return address


@exact
def piece_size(first: int, end: int) -> int:
    """Return the number of segments of the first piece: the largest subtree that begins there."""
    size = 1
    while first % (2 * size) == 0 and first + 2 * size <= end:
        size *= 2
    return size


@exact
def add_slots(
    exchange: Any, round_number: int, borders_at: int, first: int, end: int, width: int, output: int
) -> None:
    """Add some rows of all slots of a round.

    Args:
        round_number: a round that all processes have reached.
        borders_at: address of int64 ``[num_ranks + 1]``: the first segment of each process, and the number of
            segments.
        first, end: the rows.
        width: float32 values of a row.
        output: address of float32 ``[end, width]``.
    """
    keep_apart()
    borders = carray(pointer(borders_at, np.int64), (exchange.num_ranks + 1,))
    num_segments = borders[exchange.num_ranks]
    levels = np.empty((_MOST_LEVELS, width), np.float32)
    for row in range(first, end):
        total = carray(pointer(output + 4 * row * width, np.float32), (width,))
        for rank in range(exchange.num_ranks):
            part_at = slot(exchange, round_number, rank) + 4 * row * width
            segment = borders[rank]
            while segment < borders[rank + 1]:
                size = piece_size(segment, borders[rank + 1])
                part = carray(pointer(part_at, np.float32), (width,))
                low = 0
                while 1 << low < size:
                    low += 1
                high = low
                while segment >> high & 1:
                    high += 1
                segment += size
                part_at += exchange.piece_bytes
                if segment < num_segments:
                    _add_levels(levels[high], part, levels, low, high)
                else:
                    _add_levels(total, part, levels, low, high)


@exact
def _add_levels(total: Any, part: Any, levels: Any, low: int, high: int) -> None:
    """Write the sum of a part and the levels that wait for it, beginning with the lowest level."""
    for i in range(len(part)):
        total[i] = part[i]
    for level in range(low, high):
        for i in range(len(part)):
            total[i] += levels[level, i]


SUM = np.dtype(
    [
        ("exchange", np.int64),
        *((name, np.int64) for name in ("round", "borders", "num_rows", "width", "output")),
    ]
)
"""The arguments of a sum: addresses of an ``EXCHANGE``, of the borders (see ``add_slots``), and of the
output, float32 ``[num_rows, width]``. With 0 rows the processes only meet."""


@cache
def sum_kernel() -> Any:
    """Compile the function ``void sum(SUM *)``, which one thread of each process runs."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        exchange = carray(pointer(args.exchange, EXCHANGE), 1)[0]
        come(exchange)
        meet(exchange, args.round)
        if args.num_rows > 0:
            add_slots(exchange, args.round, args.borders, 0, args.num_rows, args.width, args.output)

    return compile_kernel(SUM, kernel)
