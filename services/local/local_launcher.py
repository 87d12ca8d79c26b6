"""Starts workers as processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.engine.runner.processors import Core, read_cores, share_of_quota
from quire.engine.weights.weights_file import WeightsFile, create_weights_file
from quire.models.model_files import check_local_model
from quire.rpc.server import Draining
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
from quire.services.local.places import (
    Place,
    lending_is_possible,
    next_share,
    nodes_of,
    places_of,
    processors_of,
)
from quire.services.server.log import EventLogger
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

_log = EventLogger("stack")


class LocalLauncher(ChildProcesses[WorkerConfig]):
    """Forks workers from a process that has imported their libraries, and divides the processors among them.

    Args:
        running: the dictionary to which the processes are added.
        from_image: starts processes in which the workers' libraries are already imported.
        folder: contains the workers' shared memory, unless their configuration names another folder.

    Attributes:
        places: the processors of each worker.
        weights_files: the files in which workers share their weights, by their NUMA nodes. A worker on
            another node would read them from the other's memory in each step.
    """

    host = "127.0.0.1"

    def __init__(self, running: dict[str, Child], from_image: Context, folder: str) -> None:
        super().__init__(running, run_worker, from_image)
        self._folder = folder
        self.places: dict[str, Place] = {}
        self.weights_files: dict[frozenset[int], WeightsFile] = {}

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Begin to start workers, and assign processors to each.

        Workers that start together lend each other their processors. A worker that starts later gets the
        processors of one that has ended, or is ending.
        """
        wait_for_imports(self._context)
        names = self.names - self._stopping
        left = [place for name, place in self.places.items() if name not in names]
        self.places = {name: place for name, place in self.places.items() if name in names}
        self.places |= dict(zip(configs, left, strict=False))
        num_workers = len(names) + len(configs)
        new = [name for name in configs if name not in self.places]
        own: list[list[Core]] = []
        cores = read_cores(os.sched_getaffinity(0))
        for _ in new:
            taken = [*(place.own for place in self.places.values()), *map(processors_of, own)]
            own.append(next_share(cores, taken, num_workers))
        lends = not names and lending_is_possible(configs.values())
        first = len(self.places)
        sizes = [min(len(each), share_of_quota(num_workers, index)) for index, each in enumerate(own, first)]
        places = places_of(own, sizes, Path(self._folder) if lends else None)
        self.places |= dict(zip(new, places, strict=True))
        num_weights_files = len({nodes_of(cores, place) for place in self.places.values()})
        for name, config in configs.items():
            folder = config.transport_dir or self._folder
            placed = replace(
                self.places[name].applied_to(config),
                num_sharing=num_workers,
                shares_processors=self.places[name].shared is not None or num_workers > len(cores),
                transport_dir=folder,
                weights_file=self._weights_file(config, nodes_of(cores, self.places[name])),
                num_weights_files=num_weights_files,
            )
            super().start({name: placed})

    def _weights_file(self, config: WorkerConfig, nodes: frozenset[int]) -> WeightsFile | None:
        """Return the file of the workers on some nodes; None if there is none, as for a divided model."""
        if config.tensor_parallel_size > 1:
            return None
        if nodes not in self.weights_files:
            try:
                self.weights_files[nodes] = create_weights_file()
            except OSError as error:
                _log.warning("weights_not_shared", reason=str(error))
        return self.weights_files.get(nodes)


@contextmanager
def local_launcher(config: LocalStackConfig, show: Callable[[Draining], None]) -> Iterator[LocalLauncher]:
    """Yield a launcher whose workers are stopped at the end.

    Args:
        show: called with the reports of a stopping worker about the requests that it waits for.

    Raises:
        OSError: a file of a model on this machine is missing or damaged.
    """
    check_local_model(config.worker.model_path)  # Workers do so too, but only after seconds of imports.
    from_image = fork_server(WORKER_MODULES)
    with (
        # A separate folder, so that killed workers leave no files.
        TemporaryDirectory(prefix="quire-pools-", ignore_cleanup_errors=True) as folder,
        stopped_at_end(config.worker.grace_seconds + KILL_SECONDS, show) as running,
    ):
        launcher = LocalLauncher(running, from_image, folder)
        try:
            yield launcher
        finally:
            for each in launcher.weights_files.values():
                each.close()
