"""How many processors a worker may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


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
