"""Carries out the faults of a schedule on a running cluster, and heals them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import redis

from tests.soak.chaos.cluster import Cluster
from tests.soak.chaos.proxy import Link
from tests.soak.chaos.schedule import ENDINGS, REDIS, Fault, Kind

MOST_AT_ONCE = 3
"""Faults at the same time, apart from those that end a process."""
BREAKS: frozenset[Kind] = ENDINGS | {"stop", "link cut", "link reset"}
"""Faults that may end the calls to a worker."""
BREAK_SECONDS = 3.0
"""Time after the end of a process until the next connections to workers may break."""
MAX_DEFECTS = 20
"""Number of defects after which no further fault begins."""
DELAY_SECONDS = 0.15
"""Longest time that a link holds back each chunk; a router sets workers aside that do not answer for 1 s."""
DAMAGED_CHUNKS = 2
"""Chunks that a link damages in one fault; a request has four attempts."""
FILE_BYTES = 4096
"""Size at which files can no longer grow when a disk is full: less than a block."""
_DEAD_PORT = 1
_FULL_BYTES = 1
_REDIS_BYTES = 512 << 20


class FaultRunner:
    """Runs faults: one that ends processes, and beside it at most ``MOST_AT_ONCE`` others.

    Connections to workers break one after the other, with a pause after each process that ends: a request
    that two workers die under is refused by design (docs/routing.md).
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._others = asyncio.Semaphore(MOST_AT_ONCE)
        # One more waits, so that the schedule goes on meanwhile.
        self._endings = asyncio.Semaphore(2)
        self._ending = asyncio.Lock()
        self._break = asyncio.Lock()
        self._targets: dict[tuple[str, ...], asyncio.Lock] = {}
        self._running: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    async def run(self, faults: Sequence[Fault], end_seconds: float) -> None:
        """Run faults in their order, and return when all are healed.

        Args:
            end_seconds: time of the journal after which no fault begins.
        """
        for fault in faults:
            await asyncio.sleep(fault.pause)
            journal = self._cluster.journal
            if journal.seconds > end_seconds or len(journal.defects) >= MAX_DEFECTS:
                break
            limit = self._endings if fault.kind in ENDINGS else self._others
            await limit.acquire()
            task = asyncio.create_task(self._run_one(fault, limit))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)

    async def _run_one(self, fault: Fault, limit: asyncio.Semaphore) -> None:
        if fault.kind in ENDINGS:
            lock = self._ending
        else:
            lock = self._targets.setdefault(fault.targets, asyncio.Lock())
        try:
            async with lock, self._alone_to_break(fault):
                self._cluster.journal.record("fault", **fault._asdict())
                await self._carry_out(fault)
                self._cluster.journal.record("healed", number=fault.number, kind=fault.kind)
            self.counts[fault.kind] += 1
        finally:
            limit.release()

    @asynccontextmanager
    async def _alone_to_break(self, fault: Fault) -> AsyncIterator[None]:
        """Keep other faults from breaking connections to workers while this one does."""
        if fault.kind not in BREAKS or fault.targets[-1] == REDIS:
            yield
            return
        await self._break.acquire()
        if fault.kind in ENDINGS:
            asyncio.get_running_loop().call_later(BREAK_SECONDS, self._break.release)
            yield
            return
        try:
            yield
        finally:
            self._break.release()

    async def _carry_out(self, fault: Fault) -> None:
        match fault.kind:
            case "kill" | "kill decode" | "terminate":
                await self._end(fault)
            case "stop":
                await self._stop(fault)
            case "disk full":
                await self._fill_disk(fault)
            case "redis kill" | "redis stop":
                await self._stop_redis(fault)
            case "redis flush" | "redis read-only" | "redis full":
                await self._spoil_redis(fault)
            case _:
                await self._disturb_link(fault, self._cluster.links[fault.targets[0], fault.targets[1]])

    async def _end(self, fault: Fault) -> None:
        number = signal.SIGTERM if fault.kind == "terminate" else signal.SIGKILL
        processes = [self._cluster.processes[name] for name in fault.targets]
        for name in fault.targets:
            self._cluster.end(name, number)
        for process in processes:
            status = await process.ended()
            if fault.kind == "terminate" and status != 0:
                self._cluster.journal.record_defect(
                    f"{process.name} ended with status {status} after SIGTERM"
                )
        await asyncio.sleep(fault.lasts)
        await asyncio.gather(*(self._cluster.restart(name) for name in fault.targets))

    async def _stop(self, fault: Fault) -> None:
        process = self._cluster.processes[fault.targets[0]]
        process.send(signal.SIGSTOP)
        await asyncio.sleep(fault.lasts)
        process.send(signal.SIGCONT)

    async def _fill_disk(self, fault: Fault) -> None:
        """Forbid a worker to write more than a few bytes to any file."""
        pid = self._cluster.processes[fault.targets[0]].pid
        if pid is None or not self._cluster.is_ready(fault.targets[0]):
            return
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES, hard))
            await asyncio.sleep(fault.lasts)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        except ProcessLookupError:
            pass  # another fault has ended the process

    async def _stop_redis(self, fault: Fault) -> None:
        pid = self._cluster.index.pid
        if fault.kind == "redis stop":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.lasts)
            os.kill(pid, signal.SIGCONT)
            return
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(fault.lasts)
        self._cluster.restart_redis()

    async def _spoil_redis(self, fault: Fault) -> None:
        """Empty Redis, or let it refuse writes: as a replica of a server that is not there, or as full."""
        try:
            async with self._cluster.redis_admin() as client:
                match fault.kind:
                    case "redis flush":
                        await client.flushall()
                    case "redis read-only":
                        await client.execute_command("REPLICAOF", "127.0.0.1", _DEAD_PORT)
                        await asyncio.sleep(fault.lasts)
                        await client.execute_command("REPLICAOF", "NO", "ONE")
                    case _:
                        await client.config_set("maxmemory", _FULL_BYTES)
                        await asyncio.sleep(fault.lasts)
                        await client.config_set("maxmemory", _REDIS_BYTES)
        except redis.RedisError as error:
            self._cluster.journal.record("not carried out", number=fault.number, error=error)

    async def _disturb_link(self, fault: Fault, link: Link) -> None:
        match fault.kind:
            case "link cut":
                link.is_open.clear()
                await asyncio.sleep(fault.lasts)
                link.is_open.set()
            case "link delay":
                link.delay_seconds = DELAY_SECONDS * fault.draw
                await asyncio.sleep(fault.lasts)
                link.delay_seconds = 0.0
            case "link reset":
                link.reset()
                link.is_refused = True
                await asyncio.sleep(fault.lasts)
                link.is_refused = False
            case _:
                await self._damage(fault, link)

    async def _damage(self, fault: Fault, link: Link) -> None:
        link.damages_answers_only = fault.targets[1] == REDIS
        link.damages_all = fault.targets[1] == REDIS or self._cluster.shape.has_tls
        link.place = fault.draw
        before = link.num_damaged
        link.num_to_damage = DAMAGED_CHUNKS
        await asyncio.sleep(fault.lasts)
        link.num_to_damage = 0
        self._cluster.journal.record("damaged", number=fault.number, chunks=link.num_damaged - before)
