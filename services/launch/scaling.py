"""Starts and ends workers of a launcher, until as many of each role run as an operator has ordered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from quire.protos import admin_pb2 as pb
from quire.services.launch.launcher import Event, Launcher, NotStarted, Started
from quire.services.launch.scale_orders import ScaleOrder
from quire.services.worker.config import WorkerConfig

LEAST = {"prefill": 0, "decode": 1}
"""Fewest workers of each role; decode workers generate the tokens, so there has to be one."""


@dataclass
class _Running:
    """An order that is being carried out, and the workers that have still to start or to end."""

    order: ScaleOrder
    starting: set[str] = field(default_factory=set)
    stopping: set[str] = field(default_factory=set)
    result: pb.ScaleResult = field(default_factory=pb.ScaleResult)


class Scaling:
    """Carries out orders one after the other.

    Args:
        make: returns the configuration of a new worker by its name, such as decode-2.
        drain: makes routers send no new requests to a worker, and move its answers elsewhere.
    """

    def __init__(
        self, launcher: Launcher, make: Callable[[str], WorkerConfig], drain: Callable[[str], None]
    ) -> None:
        self._launcher = launcher
        self._make = make
        self._drain = drain
        self._leaving: set[str] = set()
        self._waiting: deque[ScaleOrder] = deque()
        self._running: _Running | None = None

    def take(self, orders: Iterable[ScaleOrder]) -> None:
        """Carry out orders, as soon as those before them are done."""
        self._waiting.extend(orders)
        while self._running is None and self._waiting:
            self._running = self._begin(self._waiting.popleft())
            self._finish()

    def note(self, event: Event) -> None:
        """Note what has happened to a worker, and answer the order that waited for it."""
        running, name = self._running, event.name
        if isinstance(event, NotStarted) and running is not None and name in running.starting:
            running.result.problem = f"{name} did not start: {event.error}"
            running.starting.discard(name)
            self._stop(name, running)
        elif isinstance(event, Started) and running is not None and name in running.starting:
            running.starting.discard(name)
            running.result.started.append(name)
        elif not isinstance(event, NotStarted | Started):
            self._leaving.discard(name)
            if running is not None and name in running.stopping:
                running.stopping.discard(name)
                running.result.left.append(name)
        self._finish()

    def _begin(self, order: ScaleOrder) -> _Running:
        running = _Running(order)
        for role, number in order.num_workers.items():
            if role not in LEAST or number < LEAST[role]:
                least = " and ".join(f"{each} at least {fewest}" for each, fewest in LEAST.items())
                running.result.problem = f"{role}={number} is not possible: {least}"
                return running
        for role, number in order.num_workers.items():
            self._scale(role, number, running)
        return running

    def _scale(self, role: str, number: int, running: _Running) -> None:
        present = [name for name in self._launcher.names - self._leaving if name.startswith(f"{role}-")]
        present.sort(key=lambda name: int(name.removeprefix(f"{role}-")))
        for name in reversed(present[number:]):
            self._stop(name, running)
        free = (name for index in count() if (name := f"{role}-{index}") not in self._launcher.names)
        new = list(islice(free, max(0, number - len(present))))
        running.starting.update(new)
        self._launcher.start({name: self._make(name) for name in new})

    def _stop(self, name: str, running: _Running) -> None:
        self._drain(name)
        self._leaving.add(name)
        running.stopping.add(name)
        self._launcher.stop(name)

    def _finish(self) -> None:
        """Answer the order whose workers have all started or ended, and begin the next."""
        running = self._running
        if running is None or running.starting or running.stopping:
            return
        running.order.answer(running.result)
        self._running = None
        self.take(())
