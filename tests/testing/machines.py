"""Machines of several kinds, and a folder like Linux's /sys/devices/system that describes one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.engine.runner.processors import Core

DESKTOP = [Core(0, 0, 0, core, (core, core + 4)) for core in range(4)]
"""One socket with four cores of two hyper-threads: 0 and 4, 1 and 5, …"""

TWO_SOCKETS = [Core(core // 8, core // 8, core // 8 * 8, core, (core, core + 16)) for core in range(16)]
"""Two sockets, each a NUMA node with a cache and eight cores of two hyper-threads."""

EPYC = [Core(0, 0, core // 4 * 4, core, (core, core + 16)) for core in range(16)]
"""One socket and node with four caches, each of four cores of two hyper-threads."""


def write_system(folder: Path, cores: Sequence[Core]) -> Path:
    """Write the files that describe the cores, and return the folder."""
    for core in cores:
        for processor in core.processors:
            cpu = folder / "cpu" / f"cpu{processor}"
            _write(cpu / "topology" / "physical_package_id", [core.package])
            _write(cpu / "topology" / "thread_siblings_list", core.processors)
            sharing = [each.processors for each in cores if each.cache == core.cache]
            _write(cpu / "cache" / "index3" / "shared_cpu_list", sum(sharing, ()))
    for node in {core.node for core in cores}:
        _write(
            folder / "node" / f"node{node}" / "cpulist",
            sum((each.processors for each in cores if each.node == node), ()),
        )
    return folder


def _write(path: Path, numbers: Sequence[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",".join(map(str, sorted(numbers))) + "\n")
