"""Memory that other processes may map (memfd_create(2)), and once it is sealed only read (fcntl(2))."""

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
    """Zeroed bytes that this process writes, and the descriptor by which others map them."""

    bytes: torch.Tensor
    descriptor: int


def allocate_shared(num_bytes: int) -> SharedMemory:
    """Return memory that other processes may only read.

    The descriptor stays open as long as the process: the pool of a worker lives that long.

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
    """Return the descriptor of shared memory of 0 bytes, which ``os.ftruncate`` gives its size.

    Raises:
        OSError: the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create("quire-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def map_shared(descriptor: int) -> SharedMemory:
    """Return shared memory as a tensor of uint8 to read and write; pages are taken when first written.

    Raises:
        OSError: the memory is sealed.
    """
    view = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    # Large pages cost a reader fewer page faults. It takes effect where
    # /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise" or "within_size".
    with suppress(OSError):  # a kernel without large pages
        view.madvise(mmap.MADV_HUGEPAGE)
    return SharedMemory(torch.frombuffer(view, dtype=torch.uint8), descriptor)


def seal_shared(descriptor: int) -> None:
    """Let new mappings only read, and the size never change; mappings that exist may still write."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
