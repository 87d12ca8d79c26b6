"""What this process asks of its system: processors, open files, ports, a signal when its parent dies."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
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


def num_processors(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the processors that this process may run on, or fewer if its container has a smaller quota.

    The quota shows in no processor mask. As many threads as the machine has processors would use it up in a
    part of each period, and then stand still.
    """
    return min(len(os.sched_getaffinity(0)), share_of_quota(1, 0, cgroups, own))


def share_of_quota(num_workers: int, index: int, cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the threads of a worker by its part of the container's quota; ``sys.maxsize`` without one.

    The first workers get one more thread if the quota does not divide evenly, and each gets at least one.
    """
    quota = min(_quotas(cgroups, own), default=None)
    return sys.maxsize if quota is None else max(1, (int(quota) + num_workers - 1 - index) // num_workers)


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the processors' worth of time that this process's control group and those around it may use."""
    paths = {"": "/", "cpu": "/"}
    with suppress(FileNotFoundError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    for controller in ("", "cpu"):
        root = cgroups / controller
        group = root / paths[controller].lstrip("/")
        # The path may be the host's, of which a container sees only the end: folders may be missing.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            with suppress(FileNotFoundError):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controller else ("cpu.max",)
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
