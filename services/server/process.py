"""What this process asks of its system: open files, ports, freed memory, a signal when its parent dies."""

from __future__ import annotations

import ctypes
import resource
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
"""Number of the option of prctl(2) that asks for a signal."""
_M_TRIM_THRESHOLD = -1  # numbers of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 32 << 20
"""Largest threshold that every version of glibc accepts."""
_TRIM_BYTES = 64 << 20


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit: connections soon use up the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux for this signal when the parent of this process dies; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of an address of this machine that is free now; another process may bind it first."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def keep_freed_buffers() -> bool:
    """Let this process reuse buffers of some MiB; return whether the C library supports it.

    By default glibc returns a freed buffer of megabytes to the kernel, and the kernel must clear its pages
    again for the next message. That cuts a push to a third of its speed. The process keeps up to 64 MiB of
    free memory in exchange. The setting is for the whole process, so call this when a worker starts.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
