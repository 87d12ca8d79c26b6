"""Processors that the workers of one machine lend to each other.

A prefill worker has nothing to compute while its prompts' answers are decoded, and the processors that it was
assigned would be idle. A worker's sums have the same bits for any number of threads, so each step may run on
another number: on the worker's own processors, and on those of the workers that have no work at this moment.

A file that the workers share has two bytes for each worker, on which they hold locks: on the first byte while
the worker has work, on the second while another worker has borrowed its processors.

    worker     0        1        2
             ┌────────┬────────┬────────┐
             │busy│len│    │len│    │   │     0 has work; it has borrowed the processors of 1
             └────────┴────────┴────────┘

The system releases the locks of a process that ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LOCK = "hhqqi"
"""The system's ``struct flock``: type, whence, start, length, process."""


@dataclass(frozen=True)
class SharedProcessors:
    """The processors of a group of workers, and a worker's place in the group.

    Attributes:
        path: the file with the locks, which exists.
        index: the worker's index.
        sizes: number of processors of each worker.
    """

    path: Path
    index: int
    sizes: Sequence[int]


class LentProcessors:
    """A worker's own processors, and those of idle workers.

    Only one thread may use it. Locks belong to the open file, so several objects in one process work, too.

    Raises:
        OSError: the file does not exist any more, or the system has no such locks.
    """

    def __init__(self, shared: SharedProcessors) -> None:
        self._file = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
        self._own = shared.index
        self._sizes = shared.sizes
        self._has_own = False
        try:
            self.occupy()
            self.vacate()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Release all locks."""
        os.close(self._file)

    def occupy(self) -> None:
        """Reserve the own processors; a worker that has borrowed them gives them back after its step."""
        self._has_own = self._lock(2 * self._own)

    def vacate(self) -> None:
        """Let other workers borrow the own processors."""
        self._unlock(2 * self._own)
        self._has_own = False

    def are_wanted(self) -> bool:
        """Return whether another worker has work."""
        return any(index != self._own and self._is_locked(2 * index) for index in range(len(self._sizes)))

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """Borrow the processors of idle workers; yield the number of all processors to use."""
        # A worker that ends, and whose place this one has taken, may have held the lock until now.
        if not self._has_own:
            self.occupy()
        found = []
        try:
            for index in range(len(self._sizes)):
                if index != self._own and not self._is_locked(2 * index) and self._lock(2 * index + 1):
                    found.append(index)
            yield self._sizes[self._own] + sum(self._sizes[index] for index in found)
        finally:
            for index in found:
                self._unlock(2 * index + 1)

    def _lock(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, byte))
        except BlockingIOError:
            return False
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, byte))

    def _is_locked(self, byte: int) -> bool:
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, byte))
        return bool(struct.unpack(_LOCK, found)[0] != fcntl.F_UNLCK)


def _lock(kind: int, byte: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, byte, 1, 0)
