"""What this process asks of its system: processors, open files, ports, a signal when its parent dies."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1
"""Number of the option of prctl(2) that asks for a signal."""


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


def num_processors(cgroups: Path = CGROUPS) -> int:
    """Return the processors that this process may run on, or fewer if its container has a smaller quota.

    The quota shows in no processor mask. As many threads as the machine has processors would use it up in a
    part of each period, and then stand still.
    """
    available = len(os.sched_getaffinity(0))
    quota = _quota(cgroups)
    return available if quota is None else min(available, max(1, int(quota)))


def _quota(cgroups: Path) -> float | None:
    """Return the processors' worth of time that the container may use; None if it has no limit."""
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
    except FileNotFoundError:
        try:
            quota, period = (
                (cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        except FileNotFoundError:
            return None
    has_limit = quota.strip() not in ("max", "-1")
    return int(quota) / int(period) if has_limit else None
