"""Stops, continues and kills a process together with all processes that it has started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


class ProcessTree:
    """A process and its descendants, including those in other process groups and sessions.

    Descendants that were found once stay members after their parent has ended.

    Args:
        pid: the process at the root. It leads a process group.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._members = {self._root}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Continue the stopped processes, and stop them again when the ``with`` block ends."""
        self.resume()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop all processes, so that they use no processor until ``resume``."""
        self._send_to_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all processes."""
        self._send_to_all(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all processes, whether they are stopped or not."""
        # The processes are stopped first, so that none starts others that the kill would miss.
        self.stop()
        self._send_to_all(signal.SIGKILL)
        # A process whose parent ended before the process was found is still in the group.
        with suppress(ProcessLookupError):
            os.killpg(self._root.pid, signal.SIGKILL)

    def _send_to_all(self, number: signal.Signals) -> None:
        """Send a signal to all processes, and to those that start meanwhile."""
        reached: set[psutil.Process] = set()
        while new := self._find() - reached:
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            reached |= new

    def _find(self) -> set[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            self._members.update(self._root.children(recursive=True))
        return self._members
