"""One process of a chaos run: its start, its output, its end, and the signals that it gets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.soak.chaos.journal import Journal
from tests.soak.chaos.watched_process import REPORT
from tests.testing.forked import Forked

END_SECONDS = 60.0
"""Time after SIGTERM in which a process must have ended."""
REPORT_SECONDS = 20.0
_PROGRAM = f"""
import os, sys
os.setsid()
os.dup2(1, 2)
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.soak.chaos.watched_process import main
main()
"""


class TaskReport(NamedTuple):
    """The tasks of a process by the name of their coroutine, and how many gRPC channels are open."""

    tasks: Counter[str]
    num_channels: int


class WatchedProcess:
    """A process that may be killed and started again, always with the same command.

    Attributes:
        num_starts: how many times the process was started.
        is_ending: whether the process was told to end, or has ended.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], journal: Journal
    ) -> None:
        self.name = name
        self.num_starts = 0
        self.is_ending = True
        self._arguments = arguments
        self._environment = environment
        self._journal = journal
        self._process: Forked | None = None
        self._reading: asyncio.Task[None] | None = None
        self._reports: asyncio.Queue[TaskReport] = asyncio.Queue()

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Start the process; it is not ready yet."""
        # A pipe, since a limit on the size of files must not stop the log.
        self._process = Forked(_PROGRAM, self._arguments, environment=self._environment, has_pipes=True)
        self.num_starts += 1
        self.is_ending = False
        self._journal.record("start", process=self.name, pid=self._process.pid)
        self._reading = asyncio.create_task(self._read(self._process))

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.is_ending = True
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait for the end; return the exit status, negative for a signal.

        A process that still runs after ``END_SECONDS`` is killed.
        """
        if self._process is None or self._reading is None:
            return 0
        try:
            async with asyncio.timeout(END_SECONDS):
                await asyncio.shield(self._reading)
        except TimeoutError:
            self._journal.record_defect(f"{self.name} did not end within {END_SECONDS:.0f} s")
            self.send(signal.SIGKILL)
            await self._reading
        return self._process.wait()

    async def report(self) -> TaskReport | None:
        """Ask the process for its tasks and channels; None if it does not answer."""
        self.send(signal.SIGUSR1)
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                return await self._reports.get()
        except TimeoutError:
            return None

    async def _read(self, process: Forked) -> None:
        lines = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
        while read := await lines.readline():
            line = read.decode(errors="replace").rstrip()
            if line.startswith(REPORT):
                report = json.loads(line.removeprefix(REPORT))
                self._reports.put_nowait(TaskReport(Counter(report["tasks"]), report["channels"]))
            else:
                self._journal.record("output", process=self.name, line=line)
        status = await asyncio.to_thread(process.wait)
        process.close()
        self._journal.record("end", process=self.name, status=status)
        if not self.is_ending:
            self._journal.record_defect(f"{self.name} ended by itself with status {status}")
            self.is_ending = True
