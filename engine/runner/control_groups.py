"""Reads the limits of this process's control groups, such as a container's, versions 1 and 2.

Groups are nested, and a process is under the limits of its own group and of all groups around it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlGroups:
    """Where the system shows control groups.

    Attributes:
        root: the folder of version 2's groups, with a folder for each controller of version 1.
        own: the file that names this process's groups.
    """

    root: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")

    def num_processors(self) -> float | None:
        """Return how many processors' worth of time the processes may use; None without a limit."""
        quotas = [*self._limits("", "cpu.max"), *self._limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
        return min((quota / period for quota, period in quotas), default=None)

    def memory_bytes(self) -> int:
        """Return the most memory that the processes may use: the machine's, or the smallest limit."""
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limits = [*self._limits("", "memory.max"), *self._limits("memory", "memory.limit_in_bytes")]
        return min([machine, *(limit for (limit,) in limits)])

    def _limits(self, controller: str, *names: str) -> Iterator[list[int]]:
        """Yield the numbers in files of this process's group and of those around it, where there is a limit.

        Files that cannot be read count as absent: a service's sandbox may hide them.

        Args:
            controller: of version 1; the empty string means version 2.
        """
        paths = {"": "/", controller: "/"}
        with suppress(OSError):
            for line in self.own.read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                paths |= dict.fromkeys(controllers.split(","), path)
        root = self.root / controller
        group = root / paths[controller].lstrip("/")
        # The path may be the host's, of which a container sees only the end: folders may be missing.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            with suppress(OSError):
                numbers = " ".join((folder / name).read_text() for name in names).split()
                if numbers[0] not in ("max", "-1"):
                    yield [int(number) for number in numbers]
