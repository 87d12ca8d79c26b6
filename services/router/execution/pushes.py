"""Counts the pushes of blocks from prefill to decode workers, for a picture of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.services.router.execution.attempt import Attempt, OnParts


@dataclass(slots=True)
class PushCount:
    """This router's pushes from one worker to another: those under way, and all blocks so far."""

    num_running: int = 0
    num_blocks: int = 0


class Pushes:
    """Counts by the ids of the prefill and of the decode worker."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], PushCount] = {}

    @contextmanager
    def follow(self, attempt: Attempt) -> Iterator[OnParts | None]:
        """Count the push of an attempt as running until its answers grow, and its blocks as they arrive."""
        if attempt.prefill is None:
            yield None
            return
        pair = attempt.prefill.worker_id, attempt.decode.worker_id
        count = self.counts.setdefault(pair, PushCount())
        count.num_running += 1
        is_running, num_counted = 1, 0

        def grown() -> None:
            nonlocal is_running, num_counted
            count.num_running -= is_running
            count.num_blocks += attempt.num_pushed - num_counted
            is_running, num_counted = 0, attempt.num_pushed

        try:
            yield grown
        finally:
            grown()

    def forget(self, worker_id: str) -> None:
        """Forget the pushes of a worker that leaves."""
        for pair in [pair for pair in self.counts if worker_id in pair]:
            del self.counts[pair]
