"""Divides the processors of a machine among its workers."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise
from pathlib import Path
from statistics import mean
from tempfile import mkstemp
from typing import NamedTuple

from quire.engine.runner.lent_processors import SharedProcessors
from quire.engine.runner.processors import Core, as_ranges
from quire.services.worker.config import WorkerConfig


class Place(NamedTuple):
    """The processors of a worker.

    Attributes:
        own: those that are assigned to it.
        num_threads: its threads: one for each core, or fewer if its part of the container's quota is smaller.
        allowed: those that it may run on, with those that others may lend it.
        shared: how it borrows them; None if it borrows none.
    """

    own: tuple[int, ...]
    num_threads: int
    allowed: tuple[int, ...]
    shared: SharedProcessors | None

    def applied_to(self, config: WorkerConfig) -> WorkerConfig:
        """Return the settings of a worker at this place."""
        threads = config.threads or self.num_threads
        return replace(config, cpus=self.allowed, threads=threads, shared_processors=self.shared)

    def description(self, threads: int | None) -> str:
        """Return the own processors, and the number of threads if it is not theirs.

        Args:
            threads: the worker's setting; None takes ``num_threads``.
        """
        threads = threads or self.num_threads
        plural = "s" if len(self.own) > 1 else ""
        number = "" if threads == len(self.own) else f" ({threads} thread{'s' if threads > 1 else ''})"
        return f"processor{plural} {as_ranges(self.own)}{number}"


def numbers_by_node(cores: Iterable[Core], most: int) -> dict[str, int]:
    """Return the default number of workers of each role: one worker for each NUMA node, but one of each role.

    A worker reads its weights once a step, whatever the number of sequences. Several workers on a node, such
    as one for each cache, would read them several times from the same memory.

    Args:
        most: no more workers than this, except for one of each role.
    """
    number = max(2, min(most, len({core.node for core in cores})))
    return {"prefill": number // 2, "decode": number - number // 2}


def divide(cores: Sequence[Core], num_workers: int, level: int = 1) -> list[list[Core]]:
    """Return the cores of each worker, which are close to each other: in one package, node or cache group.

    Only workers that have no other group divide one among them, and share a core only if there are more
    workers than cores. Where groups cannot be divided evenly, the first workers get more.

    Args:
        level: how many of a core's first fields tell the groups apart that are divided next.
    """
    if num_workers == 1 or level > Core._fields.index("first") + 1:
        return [list(cores)] * num_workers
    groups = [list(group) for _, group in groupby(cores, key=lambda core: core[:level])]
    if num_workers < len(groups):
        borders = [-(-worker * len(groups) // num_workers) for worker in range(num_workers + 1)]
        return [list(chain(*groups[first:end])) for first, end in pairwise(borders)]
    numbers = [1] * len(groups)
    for _ in range(num_workers - len(groups)):
        most = max(range(len(groups)), key=lambda index: len(groups[index]) / numbers[index])
        numbers[most] += 1
    return list(chain(*(divide(*each, level + 1) for each in zip(groups, numbers, strict=True))))


def next_share(cores: Sequence[Core], taken: Iterable[Sequence[int]], num_workers: int) -> list[Core]:
    """Return the cores of the next of ``num_workers`` workers: those with the fewest other workers.

    Args:
        taken: the processors of each of the others.
    """
    users = Counter(chain(*taken))
    return min(divide(cores, num_workers), key=lambda part: mean(users[each] for each in processors_of(part)))


def processors_of(cores: Iterable[Core]) -> tuple[int, ...]:
    """Return the processors of some cores, in order."""
    return tuple(sorted(chain(*(core.processors for core in cores))))


def nodes_of(cores: Iterable[Core], place: Place) -> frozenset[int]:
    """Return the NUMA nodes of a place's own processors."""
    return frozenset(core.node for core in cores if not set(core.processors).isdisjoint(place.own))


def lending_is_possible(configs: Iterable[WorkerConfig]) -> bool:
    """Return whether each worker may change its number of threads from step to step."""
    return all(each.threads is None and each.tensor_parallel_size == 1 for each in configs)


def places_of(own: Sequence[Sequence[Core]], sizes: Sequence[int], folder: Path | None) -> list[Place]:
    """Return the places of workers that start together.

    Args:
        own: the cores of each worker.
        sizes: number of threads of each worker.
        folder: contains the files with which they lend each other processors; None if they lend none. They
            do not either if several have the same processor, or if their memory is on different NUMA nodes.
    """
    parts = [processors_of(each) for each in own]
    places = [Place(each, size, each, None) for each, size in zip(parts, sizes, strict=True)]
    if folder is None or max(Counter(chain(*parts)).values()) > 1:
        return places
    neighbors = defaultdict[frozenset[int], list[int]](list)
    for worker, cores in enumerate(own):
        neighbors[frozenset(core.node for core in cores)].append(worker)
    for group in neighbors.values():
        if len(group) > 1:
            descriptor, path = mkstemp(prefix="processors-", dir=folder)
            os.close(descriptor)
            everyone = tuple(sorted(chain(*(parts[worker] for worker in group))))
            group_sizes = tuple(sizes[worker] for worker in group)
            for index, worker in enumerate(group):
                shared = SharedProcessors(Path(path), index, group_sizes)
                places[worker] = places[worker]._replace(allowed=everyone, shared=shared)
    return places
