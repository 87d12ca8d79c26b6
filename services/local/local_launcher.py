"""Starts workers as processes of this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import NamedTuple

from quire.engine.runner.lent_processors import SharedProcessors
from quire.rpc.server import Draining
from quire.services.launch.launcher import Event, Launcher, Waitable
from quire.services.local.child_processes import (
    KILL_SECONDS,
    Child,
    ChildProcesses,
    Context,
    fork_server,
    stopped_at_end,
    wait_for_imports,
)
from quire.services.local.config import LocalStackConfig
from quire.services.server.process import share_of_quota
from quire.services.worker.config import WorkerConfig
from quire.services.worker_process import run_worker

WORKER_MODULES = (
    "quire.engine.engine_thread",
    "quire.engine.model.decode_graphs",
    "quire.engine.speculation.speculators",
    "quire.kvindex.redis_index",
    "quire.tokenization.tokenizer",
)
"""Modules that import torch, transformers and Numba, which takes seconds, and that do not import gRPC."""


class Place(NamedTuple):
    """The processors of a worker.

    Attributes:
        own: those that are assigned to it.
        num_threads: its threads: fewer than its processors if its part of the container's quota is smaller.
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


class LocalLauncher(Launcher):
    """Forks workers from a process that has imported their libraries, and divides the processors among them.

    Args:
        running: the dictionary to which the processes are added.
        from_image: starts processes in which the workers' libraries are already imported.
        folder: contains the workers' shared memory, unless their configuration names another folder.
    """

    host = "127.0.0.1"

    def __init__(self, running: dict[str, Child], from_image: Context, folder: str) -> None:
        self._folder = folder
        self._from_image = from_image
        self._processes = ChildProcesses(running, run_worker, from_image)
        self.running = running
        self._places: dict[str, Place] = {}

    @property
    def names(self) -> set[str]:
        """The workers that were started and have not ended after a stop."""
        return self._processes.names

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Begin to start workers, and assign processors to each.

        Workers that start together lend each other their processors. A worker that starts later gets the
        processors of one that has ended.
        """
        wait_for_imports(self._from_image)
        names = self.names
        left = [place for name, place in self._places.items() if name not in names]
        self._places = {name: place for name, place in self._places.items() if name in names}
        self._places |= dict(zip(configs, left, strict=False))
        num_workers = len(names) + len(configs)
        own = [place.own for place in self._places.values()]
        new = [name for name in configs if name not in self._places]
        for _ in new:
            own.append(share_of_processors(sorted(os.sched_getaffinity(0)), own, num_workers))
        lends = not names and lending_is_possible(configs.values())
        first = len(self._places)
        sizes = [
            min(len(cpus), share_of_quota(num_workers, index))
            for index, cpus in enumerate(own[first:], first)
        ]
        places = places_of(own[first:], sizes, Path(self._folder) if lends else None)
        self._places |= dict(zip(new, places, strict=True))
        for name, config in configs.items():
            folder = config.transport_dir or self._folder
            placed = self._places[name].applied_to(config)
            self._processes.start({name: replace(placed, num_sharing=num_workers, transport_dir=folder)})

    def stop(self, name: str) -> None:
        """Ask a worker to finish its requests and end."""
        self._processes.stop(name)

    def waitables(self) -> list[Waitable]:
        """Return the objects that become ready when there are events."""
        return self._processes.waitables()

    @property
    def seconds(self) -> float | None:
        """Time until the next start of a worker that has ended."""
        return self._processes.seconds

    def events(self) -> list[Event]:
        """Restart the workers that have ended, and return the events since the last call."""
        return self._processes.events()


def share_of_processors(
    available: list[int], taken: list[tuple[int, ...]], num_workers: int
) -> tuple[int, ...]:
    """Return the processors for the next of ``num_workers`` workers: those with the fewest other workers.

    The first ``len(available) % num_workers`` workers get one more processor, and each worker gets at least
    one.
    """
    users = Counter(cpu for cpus in taken for cpu in cpus)
    share, rest = divmod(len(available), num_workers)
    number = max(1, share + (len(taken) < rest))
    return tuple(sorted(sorted(available, key=lambda cpu: (users[cpu], cpu))[:number]))


def lending_is_possible(configs: Iterable[WorkerConfig]) -> bool:
    """Return whether each worker may change its number of threads from step to step."""
    return all(each.threads is None and each.tensor_parallel_size == 1 for each in configs)


def places_of(own: Sequence[tuple[int, ...]], sizes: Sequence[int], folder: Path | None) -> list[Place]:
    """Return the places of workers that start together.

    Args:
        own: the processors of each worker.
        sizes: number of threads of each worker.
        folder: contains the file with which they lend each other processors; None if they lend none. They
            do not either if several have the same processor.
    """
    everyone = tuple(sorted({cpu for each in own for cpu in each}))
    if folder is None or len(own) < 2 or len(everyone) < sum(map(len, own)):
        return [Place(cpus, size, cpus, None) for cpus, size in zip(own, sizes, strict=True)]
    descriptor, path = mkstemp(prefix="processors-", dir=folder)
    os.close(descriptor)
    return [
        Place(cpus, sizes[index], everyone, SharedProcessors(Path(path), index, tuple(sizes)))
        for index, cpus in enumerate(own)
    ]


@contextmanager
def local_launcher(config: LocalStackConfig, show: Callable[[Draining], None]) -> Iterator[LocalLauncher]:
    """Yield a launcher whose workers are stopped at the end.

    Args:
        show: called with the reports of a stopping worker about the requests that it waits for.
    """
    from_image = fork_server(WORKER_MODULES)
    with (
        # A separate folder, so that killed workers leave no files.
        TemporaryDirectory(prefix="quire-pools-", ignore_cleanup_errors=True) as folder,
        stopped_at_end(config.worker.grace_seconds + KILL_SECONDS, show) as running,
    ):
        yield LocalLauncher(running, from_image, folder)
