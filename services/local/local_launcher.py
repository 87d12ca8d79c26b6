"""Starts workers as processes of this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp

from quire.engine.lent_processors import SharedProcessors
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
        self._cpus: dict[str, tuple[int, ...]] = {}

    @property
    def names(self) -> set[str]:
        """The workers that were started and have not ended after a stop."""
        return self._processes.names

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Begin to start workers, and assign processors to each; they lend these to each other."""
        wait_for_imports(self._from_image)
        self._cpus = {name: cpus for name, cpus in self._cpus.items() if name in self.names}
        num_workers = len(self.names) + len(configs)
        available = sorted(os.sched_getaffinity(0))
        for name in configs:
            self._cpus[name] = share_of_processors(available, list(self._cpus.values()), num_workers)
        placed = {
            name: replace(
                config,
                num_sharing_gpu=num_workers,
                cpus=self._cpus[name],
                transport_dir=config.transport_dir or self._folder,
            )
            for name, config in configs.items()
        }
        self._processes.start(lend_processors(placed, Path(self._folder)))

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


def lend_processors(configs: Mapping[str, WorkerConfig], folder: Path) -> dict[str, WorkerConfig]:
    """Let workers lend each other their processors, unless these overlap or a worker has set its threads.

    Args:
        configs: workers that start together, each with its processors.
        folder: contains the file of their locks.
    """
    cpus = [each.cpus or () for each in configs.values()]
    everyone = tuple(sorted({cpu for each in cpus for cpu in each}))
    divides = any(each.threads is not None or each.tensor_parallel_size > 1 for each in configs.values())
    if len(configs) < 2 or divides or len(everyone) < sum(map(len, cpus)):
        return dict(configs)
    descriptor, path = mkstemp(prefix="processors-", dir=folder)
    os.close(descriptor)
    sizes = tuple(map(len, cpus))
    return {
        name: replace(
            config,
            cpus=everyone,
            threads=sizes[index],
            shared_processors=SharedProcessors(Path(path), index, sizes),
        )
        for index, (name, config) in enumerate(configs.items())
    }


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
