"""How many processors a worker may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def num_processors(cgroup: Path = CGROUP) -> int:
    """Return the processors that this process may run on, or fewer if its container has a smaller quota.

    The quota shows in no processor mask. As many threads as the machine has processors would use it up in a
    part of each period, and then stand still.
    """
    available = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return available
    return available if quota == "max" else min(available, max(1, int(quota) // int(period)))
