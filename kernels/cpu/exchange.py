"""Sums over processes of one machine, in memory that they share.

Each process writes its partial sums into a slot of its own, counts itself in, and waits for all others. Then
it reads all slots and adds them in a fixed binary tree, so that each process gets the same bits. There are
two sets of slots, which are used in turns: a process that has come to a round has read the slots of the round
before, so those may be written again.

Reading all slots costs one meeting, where recursive doubling needs ``log2`` of the number of processes, and
adds in the same tree.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import arrive, call_for_int, exact, keep_apart, pointer, read_shared
from quire.kernels.cpu.kernel_cache import compile_kernel

MOST_RANKS = 8
_MOST_LEVELS = MOST_RANKS.bit_length() - 1
_SPINS = 10_000
"""How often a process looks for the others before it offers its core to them."""

LINE = 64
"""Bytes from one process's counter to the next, so that each has a cache line of its own."""

EXCHANGE = np.dtype(
    [
        (name, np.int64)
        for name in ("rank", "num_ranks", "counters", "is_broken", "slots", "slot_bytes", "yield_core")
    ]
)
"""The memory of one process's exchanges.

``counters`` is the address of the rounds that each process has come to. ``is_broken`` is that of a counter
above 0 if a process has failed. ``slots`` is that of ``[2, num_ranks, slot_bytes]``.
"""


@exact
def come(exchange: Any) -> None:
    """Tell the other processes that this one has come to its next round."""
    arrive(exchange.counters + LINE * exchange.rank)


@exact
def meet(exchange: Any, round_number: int) -> None:
    """Wait until all processes have come to a round, or one has failed."""
    spins = 0
    for rank in range(exchange.num_ranks):
        while read_shared(exchange.counters + LINE * rank) < round_number:
            if read_shared(exchange.is_broken) > 0:
                return
            spins += 1
            if spins > _SPINS:
                call_for_int(exchange.yield_core)


@exact
def slot(exchange: Any, round_number: int, rank: int) -> int:
    """Return the address of the slot of a process in a round."""
    number = (round_number & 1) * exchange.num_ranks + rank
    address: int = exchange.slots + number * exchange.slot_bytes
    return address


@exact
def add_slots(exchange: Any, round_number: int, first: int, end: int, width: int, output: int) -> None:
    """Add some rows of all slots of a round.

    Args:
        round_number: a round that all processes have come to.
        first, end: the rows.
        width: float32 values of a row.
        output: address of float32 ``[end, width]``.
    """
    keep_apart()
    levels = np.empty((_MOST_LEVELS, width), np.float32)
    for row in range(first, end):
        total = carray(pointer(output + 4 * row * width, np.float32), (width,))
        for rank in range(exchange.num_ranks):
            part_at = slot(exchange, round_number, rank) + 4 * row * width
            part = carray(pointer(part_at, np.float32), (width,))
            num_waiting = 0
            while rank >> num_waiting & 1:
                num_waiting += 1
            if rank < exchange.num_ranks - 1:
                _add_levels(levels[num_waiting], part, levels, num_waiting)
            else:
                _add_levels(total, part, levels, num_waiting)


@exact
def _add_levels(total: Any, part: Any, levels: Any, num_waiting: int) -> None:
    """Write the sum of a part and of the levels that wait for it."""
    for i in range(len(part)):
        total[i] = part[i]
    for level in range(num_waiting):
        for i in range(len(part)):
            total[i] += levels[level, i]


SUM = np.dtype(
    [("exchange", np.int64), *((name, np.int64) for name in ("round", "num_rows", "width", "output"))]
)
"""The arguments of a sum: addresses of an ``EXCHANGE`` and of the output, float32 ``[num_rows, width]``."""


@cache
def sum_kernel() -> Any:
    """Compile the function ``void sum(SUM *)``, which one thread of each process runs."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        exchange = carray(pointer(args.exchange, EXCHANGE), 1)[0]
        come(exchange)
        meet(exchange, args.round)
        add_slots(exchange, args.round, 0, args.num_rows, args.width, args.output)

    signature = types.void(types.CPointer(from_dtype(SUM)))
    return compile_kernel(signature, kernel, error_model="numpy")


MEETING = np.dtype([("exchange", np.int64), ("round", np.int64)])
"""The arguments of a meeting without a sum."""


@cache
def meeting_kernel() -> Any:
    """Compile the function ``void meet(MEETING *)``, which one thread of each process runs."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        exchange = carray(pointer(args.exchange, EXCHANGE), 1)[0]
        come(exchange)
        meet(exchange, args.round)

    signature = types.void(types.CPointer(from_dtype(MEETING)))
    return compile_kernel(signature, kernel, error_model="numpy")
