"""Runs rounds in which the contenders take turns, and measures times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
Figures = TypeVar("Figures", bound=tuple[Any, ...])


def turns(contenders: Iterable[T], num_rounds: int, *, warm_up: int = 1) -> Iterator[tuple[int, T]]:
    """Yield (round, contender) for each turn; another contender begins each time.

    A temporary disturbance of the machine therefore slows all contenders. Rounds below 0 only warm up.
    """
    order = list(contenders)
    for index in range(-warm_up, num_rounds):
        first = index % len(order)
        yield from ((index, each) for each in order[first:] + order[:first])


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds."""
    return type(rounds[0])(*map(median, zip(*rounds, strict=True)))


def best_seconds(call: Callable[[], object], *, seconds: float = 0.5) -> float:
    """Return the shortest time of the calls that fit into a period, since other work only adds time."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def cpu_seconds(process_id: int) -> float:
    """Return the CPU time of a process, with that of its ended threads, in nanoseconds' resolution."""
    # Linux makes the id of a process's clock from the process id; the files in /proc count ticks of 10 ms.
    return time.clock_gettime(~process_id << 3 | 2)


def main_thread_cpu_seconds(process_id: int) -> float:
    """Return the CPU time of a process's main thread, in nanoseconds' resolution."""
    return int(Path(f"/proc/{process_id}/schedstat").read_text().split()[0]) / 1e9


def show_progress(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)
