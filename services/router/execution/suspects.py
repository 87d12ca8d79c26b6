"""Tracks suspects: requests that were on a worker when it died, each of which may have caused the death.

A suspect is retried on a worker that has answered a probe since that death. A worker that something else
killed at the same moment may seem alive for a while, and its death would say nothing about the suspect. If a
second worker dies with the suspect, the request is refused, so that one request cannot kill all workers in
turn. Most suspects are innocent, because dozens of requests may be on a worker when it dies. The router
therefore places at most one suspect on each worker, so that a second death points to a single request. A
suspect is cleared once it has received ``CLEARING_TOKENS`` new tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from quire.services.router.execution.attempt import Attempt, OnParts

MAX_DEATHS = 2
"""Number of worker deaths after which a request is refused."""
CLEARING_TOKENS = 8
"""New tokens that clear a suspect: more than one, as the dead worker may have sampled some that were lost."""
PATIENCE_SECONDS = 2.0
"""Longest time that a suspect waits for a worker without another suspect."""


class Suspects:
    """Keeps count of the suspects on each worker."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._has_changed = asyncio.Event()

    def is_near(self, worker_id: str) -> bool:
        """Return whether a suspect is on the worker."""
        return worker_id in self._taken

    async def turn(self, candidates: Callable[[], Collection[str]]) -> None:
        """Wait until one of the candidates has no suspect, but at most ``PATIENCE_SECONDS``.

        Args:
            candidates: returns the ids of the possible workers; if there are none, the wait ends.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (workers := candidates()) and all(map(self.is_near, workers)):
                    self._has_changed.clear()
                    await self._has_changed.wait()
        except TimeoutError:
            return

    @contextmanager
    def follow(self, attempt: Attempt) -> Iterator[OnParts | None]:
        """Count a suspect on the workers of an attempt until it is cleared or the attempt ends."""
        group = attempt.group
        if not group.deaths:
            yield None
            return
        num_clearing = group.num_tokens + CLEARING_TOKENS
        with self.placed(
            {worker.worker_id for worker in (attempt.decode, attempt.prefill) if worker}
        ) as clear:

            def on_parts() -> None:
                if group.num_tokens >= num_clearing:
                    group.deaths = ()
                    clear()

            yield on_parts

    @contextmanager
    def placed(self, worker_ids: Collection[str]) -> Iterator[Callable[[], None]]:
        """Count a suspect on these workers until the context ends, so that others are placed elsewhere.

        Call the yielded function once the request has been cleared of suspicion.
        """
        left = list(worker_ids)
        for worker_id in left:
            self._taken[worker_id] = self._taken.get(worker_id, 0) + 1

        def clear() -> None:
            while left:
                worker_id = left.pop()
                self._taken[worker_id] -= 1
                if not self._taken[worker_id]:
                    del self._taken[worker_id]
            self._has_changed.set()

        try:
            yield clear
        finally:
            clear()
