"""What must hold when all faults are healed and no request is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

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
"""Open files that a process may have more than before: connections that are just being closed."""
FILES_OF_A_PEER = 5
"""Open files of a worker for another one that it has met since: a channel to it, one from it, a socket for
each pool that either has mapped, and the mapped pool. A restarted worker meets the others again."""
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
        tasks: its tasks and channels; None if it did not report them.
    """

    num_starts: int
    memory_mib: float
    num_files: int
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
        sizes[name] = Size(process.num_starts, size, watched.num_fds(), tasks)
        cluster.journal.record("size", process=name, memory_mib=size, files=watched.num_fds(), tasks=tasks)
    return sizes


def growth(name: str, before: Size, after: Size, shape: Shape) -> list[str]:
    """Return what has grown in a process; a process that was restarted meanwhile is not compared."""
    if before.num_starts != after.num_starts:
        return []
    problems = []
    if after.memory_mib > before.memory_mib * MEMORY_GROWTH + MEMORY_MARGIN_MIB:
        problems.append(f"{name} grew from {before.memory_mib:.0f} to {after.memory_mib:.0f} MiB")
    if before.tasks is None or after.tasks is None:
        return [*problems, f"{name} did not report its tasks"]
    num_peers = len(shape.workers) - 1 if name in shape.workers else 0
    num_channels, num_before = after.tasks.num_channels, before.tasks.num_channels
    num_met = min(num_peers, max(0, num_channels - num_before))
    if after.num_files > before.num_files + FILES_MARGIN + FILES_OF_A_PEER * num_met:
        problems.append(f"{name} had {before.num_files} open files, and then {after.num_files}")
    tasks, earlier = after.tasks.tasks, before.tasks.tasks
    num_new = tasks.total() - earlier.total()
    if tasks[CALL] <= len(shape.routers) * CALLS_OF_A_ROUTER:
        num_new -= sum(tasks[each] - earlier[each] for each in TASKS_OF_A_CALL)
    if num_new > TASKS_MARGIN:
        problems.append(f"{name} has more tasks than before: {dict(tasks - earlier)}")
    if num_channels > max(num_before + TASKS_MARGIN, num_peers):
        problems.append(f"{name} had {num_before} channels, and then {num_channels}")
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
