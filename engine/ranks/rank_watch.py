"""Sees from outside whether the processes of the ranks still do their work.

What then happens is in ``ranks.py``: all ranks are killed, and each later step fails. A worker ends.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from quire.engine.model.collectives import SharedMemory
from quire.kernels.cpu.exchange import LINE

STOPPED_SECONDS = 1.0
"""How long a rank may be stopped: a shell stops and continues all processes of a job, but not at one time."""


class RankWatch:
    """Observes the processes of the ranks from 1.

    Times are sums of the intervals between observations, so they do not pass while this process is stopped.

    Args:
        processes: the processes of the ranks from 1.
        memory: what the ranks share.
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
