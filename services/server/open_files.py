"""Raises the limit on open files, and with it the number of connections that a process may have."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit: connections soon use up the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
