"""Which processors this process may use, and which of them share a core, a cache and memory."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.engine.runner.control_groups import ControlGroups

SYSTEM = Path("/sys/devices/system")
"""Where Linux describes processors."""

GROUPS = ControlGroups()


class Core(NamedTuple):
    """A core: its hyper-threads share it, so it computes with one thread.

    Attributes:
        package: the socket.
        node: the NUMA node, whose memory is the nearest.
        cache: the first processor that shares the third-level cache.
        first: the first hyper-thread of the core.
        processors: the hyper-threads that may be used, in order.
    """

    package: int
    node: int
    cache: int
    first: int
    processors: tuple[int, ...]


def read_cores(processors: Iterable[int], system: Path = SYSTEM) -> list[Core]:
    """Return the cores of some processors, those that share a cache or a node side by side.

    What the system does not say is not divided: without /sys, each processor is a core of one node.
    """
    nodes = {
        processor: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for processor in _read_list(folder / "cpulist")
    }

    def core_of(processor: int) -> tuple[int, int, int, int]:
        folder = system / "cpu" / f"cpu{processor}"
        package = _read_list(folder / "topology" / "physical_package_id")
        siblings = _read_list(folder / "topology" / "thread_siblings_list")
        cache = _read_list(folder / "cache" / "index3" / "shared_cpu_list")
        node = nodes.get(processor, 0)
        return min(package, default=0), node, min(cache, default=0), min(siblings, default=processor)

    threads = defaultdict[tuple[int, int, int, int], list[int]](list)
    for processor in sorted(processors):
        threads[core_of(processor)].append(processor)
    return [Core(*place, tuple(threads[place])) for place in sorted(threads)]


def num_cores(system: Path = SYSTEM, groups: ControlGroups = GROUPS) -> int:
    """Return the cores that this process may run on, or fewer if its container has a smaller quota.

    The quota shows in no processor mask. As many threads as the machine has processors would use it up in a
    part of each period, and then stand still.
    """
    return min(len(read_cores(os.sched_getaffinity(0), system)), share_of_quota(1, 0, groups))


def share_of_quota(num_workers: int, index: int, groups: ControlGroups = GROUPS) -> int:
    """Return the threads of a worker by its part of the container's quota; ``sys.maxsize`` without one.

    The first workers get one more thread if the quota does not divide evenly, and each gets at least one.
    """
    quota = groups.num_processors()
    return sys.maxsize if quota is None else max(1, (int(quota) + num_workers - 1 - index) // num_workers)


def as_ranges(processors: Iterable[int]) -> str:
    """Return the numbers of processors as Linux writes them, such as 0-3,8."""
    runs: list[list[int]] = []
    for processor in sorted(processors):
        if runs and processor == runs[-1][-1] + 1:
            runs[-1].append(processor)
        else:
            runs.append([processor])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _read_list(path: Path) -> list[int]:
    """Return the numbers of a file such as "0-3,8"; none if it is absent, empty, or says "-1" (unknown)."""
    numbers: list[int] = []
    with suppress(OSError, ValueError):
        for each in path.read_text().split(","):
            first, _, last = each.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers
