"""Lets a worker rest while another one computes prompts for it, on processors that both may use.

Workers of one machine lend each other their processors while they have nothing to do
(``runner/lent_processors.py``). A decode worker with answers always has something to do, so it rests in two
cases.

**For another client.** A prompt would get only half of the processors beside many answers. The worker rests
while such a prompt is on its way, if

* all clients that run here have more requests here than the prompt's client, and
* they have used at least as much time of the worker. A step's time counts in proportion to the clients'
  requests, and a rest as time that the prompt's client used, which may lag behind by a limited credit
  (``fairness/shares.py``).

So a client with many prompts, one after another, slows the answers of others to half their pace at most.

**For larger batches.** A step with few answers takes nearly as long as one with many. While nothing waits
here for room in a step, and each client that runs here has more prompts on their way than answers that run,
the worker rests after each step, so that the prompts' answers get into its steps sooner: for as many times
the step's time as there are prompts to an answer, up to two limits.
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
MAX_REST_STEPS = 8
"""Longest rest for larger batches, in times of the step before it."""
MAX_REST_SECONDS = 0.5
"""Longest rest for larger batches: a step may be slow for other reasons than its answers."""


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
        self._left_seconds = 0.0
        """What is left of the rest for larger batches."""
        self._used = ServedTokens[str](1e6 * CREDIT_SECONDS)
        """The microseconds that each client has used."""

    def clients(self) -> Collection[str]:
        """Return the clients whose prompts the worker rests for now; none if it should step."""
        coming, running = self._coming(), self._running()
        if not coming or not running:
            return ()
        if self._left_seconds > 0:
            return coming
        here = Counter(group.client for group in self._groups.values())
        for client in here:
            self._used.join(client)
        fewest = min(here[client] for client in running)
        least = min(map(self._used.level, running))
        return [client for client in coming if here[client] < fewest and self._used.level(client) <= least]

    @contextmanager
    def rest_for(self, clients: Collection[str]) -> Iterator[None]:
        """Count the time until the context ends as used by each of some clients."""
        begin = self._clock()
        yield
        self._left_seconds -= self._serve(dict.fromkeys(clients, 1.0), begin)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the time until the context ends as used by all clients, in proportion to their requests."""
        total = sum(self._queues.clients.values())
        parts = {client: count / total for client, count in self._queues.clients.items()}
        begin = self._clock()
        yield
        self._left_seconds = min(self._num_rest_steps() * self._serve(parts, begin), MAX_REST_SECONDS)

    def _num_rest_steps(self) -> float:
        """Return how many times as long as a step the worker rests after it, for larger batches."""
        if self._queues.waiting:
            return 0.0
        coming = self._coming()
        least = min((coming[client] / number for client, number in self._running().items()), default=0.0)
        return min(least, MAX_REST_STEPS) if least > 1 else 0.0

    def _coming(self) -> Counter[str]:
        """Count the prompts of each client that other workers compute, and that have room here."""
        return Counter(
            group.client
            for group in self._groups.values()
            if group.prompt.status is SequenceStatus.TRANSFERRING and group not in self._queues.transfers
        )

    def _running(self) -> Counter[str]:
        """Count the requests of each client that run here."""
        return Counter(group.client for group in self._queues.running)

    def _serve(self, parts: Mapping[str, float], begin: float) -> float:
        """Count the time since ``begin`` as used by some clients; return the seconds."""
        seconds = self._clock() - begin
        for client, part in parts.items():
            self._used.serve(client, round(1e6 * part * seconds))
        return seconds
