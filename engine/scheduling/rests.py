"""Lets a worker rest while another one computes a prompt for it, on processors that both may use.

Workers of one machine lend each other their processors while they have nothing to do
(``runner/lent_processors.py``). A decode worker with many answers always has something to do, so a prompt of
another client would get half of the processors. The worker rests while such a prompt is on its way, if

* all clients that run here have more requests here than the prompt's client, and
* they have used at least as much time of the worker. A step's time counts in proportion to the clients'
  requests, and a rest as time that the prompt's client used, which may lag behind by a limited credit
  (``fairness/shares.py``).

So a client with many prompts, one after another, slows the answers of others to half their pace at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.sequence import SequenceStatus
from quire.fairness.shares import ServedTokens

CREDIT_SECONDS = 1.0


class Rests:
    """Decides when the worker rests.

    Args:
        queues: the groups that run and wait here.
        groups: these, and those whose prompts other workers compute.
        clock: returns seconds.
    """

    def __init__(
        self,
        queues: GroupQueues,
        groups: Mapping[str, SequenceGroup],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._queues = queues
        self._groups = groups
        self._clock = clock
        self._used = ServedTokens[str](1e6 * CREDIT_SECONDS)
        """The microseconds that each client has used."""

    def clients(self) -> Collection[str]:
        """Return the clients whose prompts the worker rests for now; none if it should step."""
        here = Counter(group.client for group in self._groups.values())
        running = {group.client for group in self._queues.running}
        if len(here) < 2 or not running:
            return ()
        for client in here:
            self._used.join(client)
        fewest = min(here[client] for client in running)
        least = min(map(self._used.level, running))
        coming = {
            group.client
            for group in self._groups.values()
            if group.prompt.status is SequenceStatus.TRANSFERRING
        }
        return [client for client in coming if here[client] < fewest and self._used.level(client) <= least]

    @contextmanager
    def rest_for(self, clients: Collection[str]) -> Iterator[None]:
        """Count the time until the context ends as used by each of some clients."""
        begin = self._clock()
        yield
        self._serve(dict.fromkeys(clients, 1.0), begin)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the time until the context ends as used by all clients, in proportion to their requests."""
        total = sum(self._queues.clients.values())
        parts = {client: count / total for client, count in self._queues.clients.items()}
        begin = self._clock()
        yield
        self._serve(parts, begin)

    def _serve(self, parts: Mapping[str, float], begin: float) -> None:
        microseconds = 1e6 * (self._clock() - begin)
        for client, part in parts.items():
            self._used.serve(client, round(part * microseconds))
