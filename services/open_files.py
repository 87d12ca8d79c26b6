"""How many connections a process may hold."""

from __future__ import annotations

import resource


def raise_open_file_limit() -> None:
    """Allow as many open files as the system permits: connections soon use up the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
