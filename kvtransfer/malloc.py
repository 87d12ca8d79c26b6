"""Keeps the C allocator from giving message buffers back to the kernel after each message."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1  # numbers of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 32 << 20
"""The most that every glibc takes."""
_TRIM_BYTES = 64 << 20


def keep_freed_buffers() -> bool:
    """Let this process reuse buffers of some MiB; return whether the C library knows how.

    By default glibc returns a freed buffer of megabytes to the kernel, and the next message pays for clearing
    its pages again: that takes a push to a third of its speed. Costs up to 64 MiB of memory that stays with
    the process. Acts on the whole process, so it is for a worker's start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
