"""Keeps the C allocator from returning message buffers to the kernel after each message."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1  # numbers of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 32 << 20
"""Largest threshold that every version of glibc accepts."""
_TRIM_BYTES = 64 << 20


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
