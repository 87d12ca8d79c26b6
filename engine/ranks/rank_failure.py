"""Detects the failure of a rank.

Rank 0 observes the other processes and kills all of them if one fails, since some may hang. The current step
and all later ones then fail, and the worker ends.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Event, Thread

from quire.engine.model.collectives import Collectives, SharedMemory
from quire.kernels.cpu.exchange import LINE

_LOAD_SECONDS = 600.0
"""Seconds that rank 0 waits for a rank before the first step: it may compile kernels or read slowly."""
_STEP_SECONDS = 10.0
"""Seconds for which rank 0 waits for another rank in a step. All ranks have equal shares of the work."""
STOPPED_SECONDS = 1.0
"""Seconds for which a rank may be stopped. A shell stops a job's processes one after the other."""
_POLL_SECONDS = 0.05


class RankFailure:
    """Watches the ranks in a thread, and ends all of them when one fails.

    Args:
        processes: the processes of the ranks from 1.
        collectives: the collectives of rank 0. Their errors say why the ranks have failed.

    Attributes:
        reason: gets the reason when a rank fails.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], collectives: Collectives) -> None:
        self.reason: Future[str] = Future()
        self._processes = processes
        self._collectives = collectives
        self._limit = _LOAD_SECONDS
        self._is_closed = Event()
        self._thread = Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def expect_steps(self) -> None:
        """Start to enforce the time limit of a step. Call this after the first step."""
        self._limit = _STEP_SECONDS

    def end_ranks(self, problem: str) -> None:
        """Make rank 0 stop waiting, and kill all other ranks."""
        self._collectives.failure = self._collectives.failure or problem
        self._collectives.memory.break_off()
        for process in self._processes:
            process.kill()
        with suppress(InvalidStateError):  # another rank has failed before
            self.reason.set_result(problem)

    def close(self) -> None:
        """Stop watching, because the ranks are about to end."""
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        watch = RankWatch(self._processes, self._collectives.memory)
        while not self._is_closed.wait(_POLL_SECONDS):
            problem = watch.observe(_POLL_SECONDS, self._limit)
            if problem is not None:
                self.end_ranks(problem)
                return


class RankWatch:
    """Observes the processes of the ranks from 1.

    Times are sums of the intervals between observations, so time while this process is stopped does not
    count.

    Args:
        processes: the processes of the ranks from 1.
        memory: the memory that the ranks share.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], memory: SharedMemory) -> None:
        self._processes = processes
        self._memory = memory
        self._slowest = 0
        self._late_seconds = 0.0
        self._stopped_seconds = 0.0

    def observe(self, interval: float, limit: float) -> str | None:
        """Return what is wrong, if anything is.

        Args:
            interval: seconds since the last observation.
            limit: how many seconds rank 0 waits for another rank.
        """
        return self._ended() or self._stopped(interval) or self._late(interval, limit)

    def _ended(self) -> str | None:
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                return f"rank {rank} has ended with code {process.returncode}"
        return None

    def _stopped(self, interval: float) -> str | None:
        stopped = [rank for rank, each in enumerate(self._processes, 1) if is_stopped(each.pid)]
        self._stopped_seconds = self._stopped_seconds + interval if stopped else 0.0
        return f"rank {stopped[0]} has been stopped" if self._stopped_seconds > STOPPED_SECONDS else None

    def _late(self, interval: float, limit: float) -> str | None:
        rounds = self._memory.counters[:: LINE // 8][: len(self._processes) + 1].tolist()
        slowest = min(rounds)
        if slowest != self._slowest or rounds[0] == slowest:
            self._slowest, self._late_seconds = slowest, 0.0
            return None
        self._late_seconds += interval
        if self._late_seconds <= limit:
            return None
        return f"rank {rounds.index(slowest)} has not answered for {limit:.0f} s"


def is_stopped(process_id: int) -> bool:
    """Return whether a signal has stopped a process; False if it has ended."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False
