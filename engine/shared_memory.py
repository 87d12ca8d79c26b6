"""Memory that other processes may map and read, but neither write nor resize (memfd_create(2), fcntl(2))."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from typing import NamedTuple

import torch

F_SEAL_FUTURE_WRITE = 0x10
"""Number from linux/fcntl.h: no new mapping may write. Linux has it since 5.1, Python has no name for it."""
SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory(NamedTuple):
    """Zeroed bytes that this process writes, and the descriptor by which others map them read-only."""

    bytes: torch.Tensor
    descriptor: int


def allocate_shared(num_bytes: int) -> SharedMemory:
    """Return shared memory as a tensor of uint8; its pages are taken when they are first written.

    The descriptor stays open as long as the process: the pool of a worker lives that long.

    Raises:
        OSError: the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    descriptor = os.memfd_create("quire-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        # This mapping may write, since it is older than the seals.
        view = mmap.mmap(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        # Large pages cost a reader fewer page faults. It takes effect where
        # /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise" or "within_size".
        with suppress(OSError):  # a kernel without large pages
            view.madvise(mmap.MADV_HUGEPAGE)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedMemory(torch.frombuffer(view, dtype=torch.uint8), descriptor)
