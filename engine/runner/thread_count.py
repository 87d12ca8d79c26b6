"""Chooses how many threads compute a step: fewer while other programs keep processors busy.

The threads of a step wait for each other after each phase. If another program has the processor of one of
them, all wait until its time slice ends, some milliseconds later, many times in a step. A step of one stream
then took 20 times as long as with a thread less. The number of threads changes no bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter

import torch

INTERVAL_SECONDS = 0.1
"""Seconds of computing after which the number of threads is chosen again."""
LONG_STEP_SECONDS = 0.1
"""A step that takes longer lasts for many time slices; there, part of a processor is better than none."""
MIN_LOST = 0.8
"""Processors' worth of time that other programs take before a thread is left out."""
MIN_IDLE = 0.4
"""Idle part of a processor that is enough for another thread."""


class ProcessorTimes:
    """What Linux counts about processors and about this process; nothing where it does not count.

    Args:
        proc: the folder /proc.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def seconds_waited(self) -> float:
        """Return how long threads of this process could have run, but had no processor."""
        nanoseconds = 0
        for path in self._proc.glob("self/task/*/schedstat"):
            with suppress(OSError):  # the thread has ended
                nanoseconds += int(path.read_text().split()[1])
        return nanoseconds / 1e9

    def seconds_idle(self, processors: Set[int]) -> float:
        """Return how long these processors had nothing to run, each by itself and added up.

        In a container, lxcfs numbers the processors from 0, but affinities keep the numbers of the host. If
        some processors are missing, all that the system shows count instead.
        """
        ticks: dict[str, int] = {}
        with suppress(OSError):
            for line in (self._proc / "stat").read_text().splitlines():
                name, *values = line.split()
                if name.startswith("cpu"):
                    ticks[name] = int(values[3])
        names = {f"cpu{each}" for each in processors}
        idle = sum(map(ticks.__getitem__, names)) if names <= ticks.keys() else ticks.get("cpu", 0)
        return idle / os.sysconf("SC_CLK_TCK")


class ThreadCount:
    """The number of threads of each step, at most torch's.

    Args:
        times: what the system counts.
        clock: returns seconds.
    """

    def __init__(
        self, times: ProcessorTimes | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._times = times or ProcessorTimes()
        self._clock = clock
        self._num_left_out = 0
        self._num_steps = 0
        self._computed = 0.0
        self._ended_at = self._clock()
        self._waited = self._times.seconds_waited()
        self._idle = (0.0, 0.0)
        """The time when a thread was left out or the number was chosen, and the seconds idle until then."""

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Let torch and the kernels use the chosen number of threads."""
        most = torch.get_num_threads()
        if most == 1:
            yield
            return
        began = self._clock()
        if began - self._ended_at > INTERVAL_SECONDS:
            # What other threads of this process waited for since the last step says nothing about steps.
            self._begin_interval(self._times.seconds_waited())
        if self._num_left_out:
            torch.set_num_threads(max(1, most - self._num_left_out))
        try:
            yield
        finally:
            if self._num_left_out:
                torch.set_num_threads(most)
            self._ended_at = self._clock()
            self._num_steps += 1
            self._computed += self._ended_at - began
            if self._computed >= INTERVAL_SECONDS:
                self._choose(most)

    def _choose(self, most: int) -> None:
        waited = self._times.seconds_waited()
        num_lost = (waited - self._waited) / self._computed
        if self._computed / self._num_steps > LONG_STEP_SECONDS:
            self._num_left_out = 0
        elif num_lost >= MIN_LOST:
            self._num_left_out = min(self._num_left_out + round(num_lost), most - 1)
            self._idle = self._read_idle()
        elif self._num_left_out:
            (began, before), self._idle = self._idle, self._read_idle()
            num_idle = (self._idle[1] - before) / (self._idle[0] - began)
            self._num_left_out = max(0, self._num_left_out - int(num_idle + 1 - MIN_IDLE))
        self._begin_interval(waited)

    def _begin_interval(self, waited: float) -> None:
        self._waited, self._computed, self._num_steps = waited, 0.0, 0

    def _read_idle(self) -> tuple[float, float]:
        return self._clock(), self._times.seconds_idle(os.sched_getaffinity(0))
