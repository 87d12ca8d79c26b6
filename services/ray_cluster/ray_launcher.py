"""Starts workers on the nodes of a Ray cluster, each in its own actor and placement group.

Ray places and watches; requests and blocks never pass through it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.rpc.server import Draining
from quire.services.launch.launcher import (
    Event,
    Launcher,
    LaunchError,
    Mailbox,
    NotStarted,
    Started,
    Stopped,
    Waitable,
)
from quire.services.local.child_processes import KILL_SECONDS
from quire.services.local.config import LocalStackConfig
from quire.services.ray_cluster.connection import connected
from quire.services.ray_cluster.worker_actor import WorkerActor
from quire.services.server.log import EventLogger
from quire.services.worker.config import WorkerConfig

PLACE_SECONDS = 60.0
"""Longest time that Ray may take to find a node with room."""
AGAIN_SECONDS = 0.5
"""Interval at which an actor that Ray starts again is asked whether it is there."""
METHODS_AT_ONCE = 4

_log = EventLogger("stack")


@dataclass
class _Placed:
    """A worker, the reservation of its processors, and its actor once it is placed.

    Attributes:
        late: logs that Ray does not start the worker again, unless it is cancelled.
    """

    config: WorkerConfig
    group: PlacementGroup
    late: threading.Timer
    actor: Any = None
    is_stopping: bool = False


class RayLauncher(Launcher):
    """Keeps one thread for each worker, which follows its actor."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._workers: dict[str, _Placed] = {}
        self._happened: Mailbox[Event] = Mailbox()
        self._threads: dict[str, threading.Thread] = {}

    @property
    def host(self) -> str:
        """Address of this machine, by which the other nodes reach it."""
        return self._host

    @property
    def names(self) -> set[str]:
        """The workers that were started and have not ended after a stop."""
        return set(self._workers)

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        """Begin to reserve processors for workers, and to start them there."""
        for name, config in configs.items():
            config = replace(config, threads=config.threads or config.tensor_parallel_size)
            # The ranks of a worker share memory, so its reservation is one bundle, which lies on one node.
            group = placement_group([{"CPU": num_cpus(config)}], strategy="STRICT_PACK", name=name)
            self._workers[name] = _Placed(config, group, late=_timer(name, config))
            thread = threading.Thread(target=self._follow, args=(name,), name=name, daemon=True)
            self._threads[name] = thread
            thread.start()

    def stop(self, name: str) -> None:
        """Tell a worker to finish its requests and end."""
        worker = self._workers[name]
        worker.is_stopping = True
        if worker.actor is not None:
            worker.actor.stop.remote()
        else:
            remove_placement_group(worker.group)

    def waitables(self) -> list[Waitable]:
        """Return what becomes ready when there are events."""
        return [self._happened.waitable]

    @property
    def seconds(self) -> None:
        """Ray itself starts again what ends."""
        return None

    def events(self) -> list[Event]:
        """Return what has happened."""
        events = self._happened.take()
        for event in events:
            if isinstance(event, Stopped):
                self._remove(event.name)
        return events

    def close(self, grace_seconds: float) -> None:
        """End all workers, and give back what was reserved for them."""
        for name in self.names:
            self.stop(name)
        deadline = time.monotonic() + grace_seconds + 2 * KILL_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        for name in self.names:
            self._remove(name)

    def _remove(self, name: str) -> None:
        worker = self._workers.pop(name)
        worker.late.cancel()
        if worker.actor is not None:
            ray.kill(worker.actor, no_restart=True)
        remove_placement_group(worker.group)

    def _follow(self, name: str) -> None:
        """Report what happens to a worker until it has stopped."""
        worker = self._workers[name]
        if self._place(name, worker):
            has_served = False
            while not worker.is_stopping:
                has_served |= self._follow_one_life(name, worker, is_again=has_served)
        self._happened.put(Stopped(name))

    def _place(self, name: str, worker: _Placed) -> bool:
        """Put a worker's actor into its reservation; return whether Ray could before a stop."""
        deadline = time.monotonic() + PLACE_SECONDS
        while not (is_placed := worker.group.wait(AGAIN_SECONDS)) and time.monotonic() < deadline:
            if worker.is_stopping:
                return False
        if not is_placed:
            needed = num_cpus(worker.config)
            free = ", ".join(f"{_cpus(node)} on {node['NodeManagerAddress']}" for node in ray.nodes())
            problem = (
                f"no node of the Ray cluster had {needed} free CPUs within {PLACE_SECONDS:.0f} s (in all: "
                f"{free}); add nodes, or ask for fewer workers or --threads"
            )
            self._happened.put(NotStarted(name, LaunchError(problem)))
            while not worker.is_stopping:
                time.sleep(AGAIN_SECONDS)
            return False
        worker.actor = _remote(worker)
        return True

    def _follow_one_life(self, name: str, worker: _Placed, *, is_again: bool) -> bool:
        """Report the start and the end of one process; return whether it served."""
        has_served = False
        try:
            report = ray.get(worker.actor.started.remote())
            if isinstance(report, str):
                self._happened.put(NotStarted(name, LaunchError(report)))
            else:
                has_served = True
                worker.late.cancel()
                self._happened.put(Started(name, report))
                if is_again:
                    _log.info("process_started_again", name=name, address=report.address)
            ray.get(worker.actor.ended.remote())
        except RayActorError:
            if has_served and not worker.is_stopping:
                _log.error("process_ended", name=name, end="ended, or its node did")
                worker.late = _timer(name, worker.config)
                worker.late.start()
            time.sleep(AGAIN_SECONDS)
        return has_served


def _timer(name: str, config: WorkerConfig) -> threading.Timer:
    """Return what logs that Ray has not started a worker again; Ray itself says nothing."""
    needs = f"a node with {num_cpus(config)} free CPUs"
    timer = threading.Timer(
        PLACE_SECONDS, partial(_log.warning, "process_not_started_again", name=name, needs=needs)
    )
    timer.daemon = True
    return timer


def _remote(worker: _Placed) -> Any:
    strategy = PlacementGroupSchedulingStrategy(worker.group, placement_group_bundle_index=0)
    options = {"num_cpus": num_cpus(worker.config), "max_restarts": -1, "max_concurrency": METHODS_AT_ONCE}
    actor = ray.remote(WorkerActor).options(**options, scheduling_strategy=strategy)
    return actor.remote(worker.config)


def num_cpus(config: WorkerConfig) -> int:
    """Return the processors that a worker keeps busy, with all its ranks."""
    return max(config.threads or 1, config.tensor_parallel_size)


def _cpus(node: Mapping[str, Any]) -> str:
    return f"{node['Resources'].get('CPU', 0):g} CPUs" if node["Alive"] else "none (dead)"


@contextmanager
def _ray_launcher(
    config: LocalStackConfig, show: Callable[[Draining], None], *, address: str
) -> Iterator[RayLauncher]:
    with connected(address) as host:
        launcher = RayLauncher(host)
        try:
            yield launcher
        finally:
            launcher.close(config.worker.grace_seconds)


def ray_launcher(address: str) -> Any:
    """Return what opens a launcher of a Ray cluster, see ``connected``."""
    return partial(_ray_launcher, address=address)
