"""What must hold when all faults are healed and no request is under way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.soak.chaos.cluster import Cluster
from tests.soak.chaos.processes import TaskReport
from tests.soak.chaos.schedule import Shape

QUIET_SECONDS = 60.0
"""Longest time until nothing is held: expired leases and lost connections take some seconds."""
MEMORY_GROWTH, MEMORY_MARGIN_MIB = 1.1, 8.0
FILES_MARGIN = 8
"""Open files, or connections, that a process may have more than before: some are just being closed."""
SOCKETS_OF_A_WORKER, SOCKETS_OF_A_PEER = 9, 4
"""Sockets of a worker, with a client of Redis and of its metrics; and those for each other worker: a channel
to it, one from it, and one for each pool that either has mapped. A restarted worker opens them when it first
meets the other, so they are no leak."""
TASKS_MARGIN = 2
CALL, TASKS_OF_A_CALL = "_schedule_rpc_coro", ("_schedule_rpc_coro", "_handle_exceptions")
CALLS_OF_A_ROUTER = 2
"""Calls that a router keeps open to a worker: its watch, and with the first request its stream of outputs."""
_WORKER_GAUGES = (
    ("quire_kv_cache_blocks", "used"),
    ("quire_kv_pinned_blocks", ""),
    ("quire_requests_running", ""),
    ("quire_requests_waiting", ""),
    ("quire_requests_transferring", ""),
    ("quire_requests_waiting_for_blocks", ""),
    ("quire_kv_leases", ""),
    ("quire_prefill_backlog_tokens", ""),
)
_ROUTER_GAUGES = (("quire_router_requests_running", ""), ("quire_router_requests_waiting", ""))


@dataclass(frozen=True)
class Size:
    """What a process uses at rest.

    Attributes:
        num_starts: which process of this name it is.
        memory_mib: resident memory without mapped files, in MiB.
        num_files: its open files without sockets.
        tasks: its tasks and channels; None if it did not report them.
    """

    num_starts: int
    memory_mib: float
    num_files: int
    num_sockets: int
    tasks: TaskReport | None


async def check_rest(cluster: Cluster) -> None:
    """Record a defect for each process that still holds something after ``QUIET_SECONDS``."""
    held: Mapping[str, object] = {}
    try:
        async with asyncio.timeout(QUIET_SECONDS), aiohttp.ClientSession() as session:
            while True:
                if not (held := await _held(cluster, session)):
                    return
                await asyncio.sleep(0.2)
    except TimeoutError:
        for name, what in held.items():
            cluster.journal.record_defect(f"{name} at rest: {what}")


async def measure(cluster: Cluster) -> dict[str, Size]:
    """Return what each process uses; call it at rest."""
    running = {name: each for name, each in cluster.processes.items() if each.pid is not None}
    # A report collects garbage, and with it connections, which the process at their other end has open too.
    reports = {name: await process.report() for name, process in running.items()}
    sizes = {}
    for name, process in running.items():
        watched, tasks = psutil.Process(process.pid), reports[name]
        memory = watched.memory_info()
        size = (memory.rss - memory.shared) / (1 << 20)
        num_sockets = _num_sockets(watched.pid)
        num_files = watched.num_fds() - num_sockets
        sizes[name] = Size(process.num_starts, size, num_files, num_sockets, tasks)
        figures = {"memory_mib": size, "files": num_files, "sockets": num_sockets, "tasks": tasks}
        cluster.journal.record("size", process=name, **figures)
    return sizes


def _num_sockets(pid: int) -> int:
    targets = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            targets.append(os.readlink(each))
    return sum(target.startswith("socket:") for target in targets)


def growth(name: str, before: Size, after: Size, shape: Shape) -> list[str]:
    """Return what has grown in a process; a process that was restarted meanwhile is not compared."""
    if before.num_starts != after.num_starts:
        return []
    problems = []
    if after.memory_mib > before.memory_mib * MEMORY_GROWTH + MEMORY_MARGIN_MIB:
        problems.append(f"{name} grew from {before.memory_mib:.0f} to {after.memory_mib:.0f} MiB")
    if after.num_files > before.num_files + FILES_MARGIN:
        problems.append(f"{name} had {before.num_files} open files, and then {after.num_files}")
    num_routers, num_peers, expected = len(shape.routers), 0, 0
    if name in shape.workers:
        num_peers = len(shape.workers) - 1
        expected = SOCKETS_OF_A_WORKER + num_routers + SOCKETS_OF_A_PEER * num_peers
    if after.num_sockets > max(before.num_sockets + FILES_MARGIN, expected):
        problems.append(f"{name} had {before.num_sockets} sockets, and then {after.num_sockets}")
    if before.tasks is None or after.tasks is None:
        return [*problems, f"{name} did not report its tasks"]
    tasks, earlier = after.tasks.tasks, before.tasks.tasks
    num_new = tasks.total() - earlier.total()
    if tasks[CALL] <= num_routers * CALLS_OF_A_ROUTER:
        num_new -= sum(tasks[each] - earlier[each] for each in TASKS_OF_A_CALL)
    if num_new > TASKS_MARGIN:
        problems.append(f"{name} has more tasks than before: {dict(tasks - earlier)}")
    if after.tasks.num_channels > max(before.tasks.num_channels + TASKS_MARGIN, num_peers):
        problems.append(
            f"{name} had {before.tasks.num_channels} channels, and then {after.tasks.num_channels}"
        )
    return problems


async def _held(cluster: Cluster, session: aiohttp.ClientSession) -> dict[str, object]:
    """Return what each process still holds; processes that hold nothing are left out."""
    held: dict[str, object] = {}
    for name in (*cluster.shape.workers, *cluster.shape.routers):
        gauges = _ROUTER_GAUGES if name in cluster.shape.routers else _WORKER_GAUGES
        url = f"http://127.0.0.1:{cluster.ports[name].metrics}/metrics"
        try:
            async with session.get(url) as response:
                values = _gauges(await response.text())
        except aiohttp.ClientError as error:
            held[name] = f"does not show its metrics: {error}"
            continue
        if found := {gauge: values.get(gauge) for gauge in gauges if values.get(gauge) != 0}:
            held[name] = found
    for router in cluster.shape.routers:
        known = await cluster.list_workers(router)
        workers = known.workers if known is not None else []
        if busy := {worker.worker_id: worker.num_requests for worker in workers if worker.num_requests}:
            held[f"{router}'s account"] = busy
    return held


def _gauges(text: str) -> dict[tuple[str, str], float]:
    """Return the values of gauges by name and state; the state is empty where there is none."""
    return {
        (sample.name, sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
