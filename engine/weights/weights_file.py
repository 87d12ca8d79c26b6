"""A file of memory with the weights of a model, which the workers of one machine share (memfd_create(2)).

::

    launcher                     first worker                        other workers
    makes an empty file,
    passes it to each worker ──► locks it, reads the checkpoint,     wait for the lock
                                 writes the weights, seals the file
                                 unlocks it ───────────────────────► see the seal, map the file

The seal says that the file is complete. The first worker that maps it then checks its model, and notes the
result in a second file, so that the others need not compute with the model before they serve. If a worker
dies before it has written or checked, the system releases its lock, and the next worker begins again. The
launcher keeps both files open, so that they outlive each worker. They have no name in any directory, and
their memory is freed when the last process that holds them has ended.

Importing this does not load torch, which launchers do not need.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals after which no process can change the file in any way, not even the one that wrote it."""
LOCK_SECONDS = 900.0
"""Time limit for another worker to write the file: 140 GB from a disk of 0.2 GB/s take 12 minutes."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WeightsFile:
    """The descriptors of a file and of its notes. A new process that gets this has descriptors of its own."""

    descriptor: int
    notes: int

    def __reduce__(self) -> tuple[Callable[..., WeightsFile], tuple[Any, Any]]:
        return _received, (DupFd(self.descriptor), DupFd(self.notes))

    @property
    def is_complete(self) -> bool:
        """Whether the weights are written and sealed, so that no process can change them."""
        return bool(fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    @property
    def num_bytes(self) -> int:
        """The memory that is written so far, in bytes."""
        return os.fstat(self.descriptor).st_blocks * 512

    @contextmanager
    def locked(self, seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Lock the file; the lock ends with its process.

        Raises:
            TimeoutError: others hold it for all this time.
        """
        # The lock belongs to an opening of the file, and all processes inherit the launcher's.
        own, deadline = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR), time.monotonic() + seconds
        try:
            while True:
                try:
                    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another worker has not written them in {seconds:g} s") from None
                    time.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(own)

    def seal(self) -> None:
        """Declare the file complete.

        Raises:
            OSError: a process has a mapping that can write.
        """
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def read_notes(self) -> bytes:
        """Return what a worker has noted about the weights; empty if none has."""
        return os.pread(self.notes, os.fstat(self.notes).st_size, 0)

    def write_notes(self, notes: bytes) -> None:
        """Replace the notes; the caller holds the lock."""
        os.ftruncate(self.notes, 0)
        os.pwrite(self.notes, notes, 0)

    def close(self) -> None:
        """Close this process's descriptors. Mappings remain."""
        os.close(self.descriptor)
        os.close(self.notes)


def create_weights_file() -> WeightsFile:
    """Return an empty file.

    Raises:
        OSError: the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    descriptor = os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        return WeightsFile(descriptor, os.memfd_create("quire-weights-notes", os.MFD_CLOEXEC))
    except OSError:
        os.close(descriptor)
        raise


def _received(descriptor: Any, notes: Any) -> WeightsFile:
    return WeightsFile(descriptor.detach(), notes.detach())
