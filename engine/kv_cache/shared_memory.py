"""Memory that other processes may map (memfd_create(2)), but only read once it is sealed (fcntl(2))."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from typing import NamedTuple

import torch

F_SEAL_FUTURE_WRITE = 0x10
"""Seal that forbids new writable mappings, since Linux 5.1. Python has no name for it (linux/fcntl.h)."""
SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory(NamedTuple):
    """Zeroed bytes that this process writes, and the descriptor by which others map them."""

    bytes: torch.Tensor
    descriptor: int


def allocate_shared(num_bytes: int) -> SharedMemory:
    """Return memory that other processes may only read.

    The descriptor is never closed, since a worker's pool exists as long as its process.

    Raises:
        OSError: the system has no such memory.
    """
    descriptor = create_shared()
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = map_shared(descriptor)
        seal_shared(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return memory


def create_shared() -> int:
    """Return the descriptor of shared memory of 0 bytes; ``os.ftruncate`` sets its size.

    Raises:
        OSError: the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create("quire-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def map_shared(descriptor: int) -> SharedMemory:
    """Return shared memory as a writable tensor of uint8. The system allocates a page at its first write.

    Raises:
        OSError: the memory is sealed.
    """
    view = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    use_large_pages(view)
    return SharedMemory(torch.frombuffer(view, dtype=torch.uint8), descriptor)


def use_large_pages(view: mmap.mmap) -> None:
    """Ask for large pages, which cost a reader fewer page faults.

    This takes effect where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise" or "within_size".
    """
    with suppress(OSError):  # a kernel without large pages
        view.madvise(mmap.MADV_HUGEPAGE)


def seal_shared(descriptor: int) -> None:
    """Make new mappings read-only, and fix the size; existing mappings may still write."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
