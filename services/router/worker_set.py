"""Tracks the live workers: their descriptions, whether they answer, and the router's work in flight there."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from quire.kvindex.membership import ROLES
from quire.protos import worker_pb2
from quire.rpc.closed_channel import ChannelClosedError
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.proof import Caller
from quire.rpc.tls import Connect
from quire.services.router.acceptance import Acceptance
from quire.services.router.config import SILENT_SECONDS
from quire.services.router.membership import Member, Membership, MembershipLost
from quire.services.router.probe import Probe, StrangerError, probe_worker
from quire.services.router.pulse import Pulses
from quire.services.router.worker import Worker, WorkerConnection
from quire.services.router.worker_watch import watch_worker
from quire.services.server.log import get_logger

PROBE_SECONDS = 2.0
PENALTY_SECONDS = 2.0
ASK_AGAIN_SECONDS = 0.2
"""Pause between two probes of a worker that is set aside."""

_log = get_logger("router")


class WorkerSet:
    """Follows the membership and keeps one channel for each worker.

    A worker that answers stays until it reports that it is leaving. If its lease is gone, the router asks the
    worker itself, because Redis may have lost all leases at once.

    All workers must serve the model of the first worker, with the same KV layout and block hashes. Others are
    refused. Once all workers drain or have left, workers with another version of the arithmetic may follow.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        expected_fingerprint: Callable[[bytes], str] | None = None,
        connect: Connect = grpc.aio.insecure_channel,
        silent_seconds: float = SILENT_SECONDS,
        trust: ClusterTrust | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.router_id = secrets.token_hex(8)
        """Names this router's requests, so that workers can report the load of all others."""
        self._membership = membership
        self._connect = connect
        self._silent_seconds = silent_seconds
        self._probe_seconds = min(PROBE_SECONDS, silent_seconds / 3)
        self._trust = trust or ClusterTrust()
        self._caller = Caller(self._trust.secret)
        self._clock = clock
        self._pulses = Pulses(clock, self._reach)
        self._workers: dict[str, Worker] = {}
        self._acceptance = Acceptance(self._trust, expected_fingerprint)
        self._is_membership_lost = False
        self.expects_workers = False
        """Whether the membership lists workers that have not joined."""
        self._on_leave: list[Callable[[str], None]] = []
        self._on_return: list[Callable[[], None]] = []
        self._on_drain: list[Callable[[Worker], None]] = []
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._asking: dict[Worker, asyncio.Task[None]] = {}
        """Probes of the workers that are set aside."""
        self._asked_again: dict[Worker, asyncio.Task[None]] = {}
        """Probes for the sake of suspects, which share them."""
        self._closing: set[asyncio.Task[None]] = set()
        self._refreshing = asyncio.Lock()

    def call_on_leave(self, forget: Callable[[str], None]) -> None:
        """Call a function with the id of each worker that leaves from now on."""
        self._on_leave.append(forget)

    def call_on_return(self, notice: Callable[[], None]) -> None:
        """Call a function whenever a worker has joined or takes requests again."""
        self._on_return.append(notice)

    def call_on_drain(self, notice: Callable[[Worker], None]) -> None:
        """Call a function with each worker that begins to drain."""
        self._on_drain.append(notice)

    @property
    def reference(self) -> worker_pb2.GetWorkerInfoResponse | None:
        """Description of the first worker that joined; None until one has joined."""
        return self._acceptance.reference

    def all(self) -> list[Worker]:
        """Return every worker, including those that drain."""
        return list(self._workers.values())

    def live(self, role: str) -> list[Worker]:
        """Return the workers of a role that do not drain."""
        return [w for w in self._workers.values() if w.role == role and not w.is_draining]

    def serving(self, role: str) -> list[Worker]:
        """Return the workers of a role that may get requests: they are live and not set aside or stalled."""
        return [w for w in self._workers.values() if w.role == role and w.can_serve]

    def is_unhealthy(self, worker: Worker) -> bool:
        """Return whether the worker is unhealthy: it failed recently, or it may be unable to serve."""
        return worker.is_in_doubt or self._clock() < worker.unhealthy_until

    async def ask_again(self, since: float) -> None:
        """Ask the workers that may get requests, except those that have answered since a clock reading.

        Those that have just ended then leave, and those that do not answer stay without a newer answer.
        """
        serving = [worker for role in ROLES for worker in self.serving(role) if worker.answered_at < since]
        for worker in serving:
            if worker not in self._asked_again:
                self._asked_again[worker] = asyncio.create_task(self._ask_once(worker))
        if serving:
            await asyncio.wait([self._asked_again[worker] for worker in serving])

    async def _ask_once(self, worker: Worker) -> None:
        try:
            await self._ask(worker)
        finally:
            del self._asked_again[worker]

    def set_aside(self, worker: Worker) -> asyncio.Task[None]:
        """Give a worker no requests until it has answered a probe; return the task that asks it.

        Then other workers are preferred for another ``PENALTY_SECONDS``.
        """
        worker.unhealthy_until = self._clock() + PENALTY_SECONDS
        if not worker.is_set_aside:
            worker.is_set_aside = True
            _log.warning("worker_set_aside", worker=worker.worker_id)
        if worker not in self._asking:
            self._asking[worker] = asyncio.create_task(self._ask_until_answered(worker))
        return self._asking[worker]

    @contextmanager
    def dispatched(
        self, worker: Worker, *, pending_tokens: int = 0, resident_tokens: int = 0
    ) -> Iterator[Callable[[], None]]:
        """Count a request and its tokens as in flight on a worker until the context ends.

        Call the yielded function once the prompt has been computed: it clears the pending prefill tokens.
        """
        worker.num_requests += 1
        worker.pending_tokens += pending_tokens
        worker.resident_tokens += resident_tokens
        left = pending_tokens

        def computed() -> None:
            nonlocal left
            worker.pending_tokens -= left
            left = 0

        try:
            yield computed
        finally:
            computed()
            worker.resident_tokens -= resident_tokens
            worker.num_requests -= 1
            if worker.has_left and worker.num_requests == 0:
                self._close_soon(worker.connection)

    async def refresh(self) -> None:
        """Bring the set up to date with the membership."""
        async with self._refreshing:
            records: dict[str, list[Member]] = {}
            for member in await self._members():
                records.setdefault(member.address, []).append(member)
            self._acceptance.forget_all_but(records.keys())
            addresses = records.keys() | self._workers.keys()
            await asyncio.gather(*(self._update(address, records.get(address, [])) for address in addresses))
            self.expects_workers = not records.keys() <= self._workers.keys()

    async def ask_busy(self) -> None:
        """Probe the workers that have requests or are in doubt; end the calls of those that do not serve.

        A lease is not enough for a busy worker: it expires late, and it stays alive when the engine is stuck.
        """
        busy = [worker for worker in self._workers.values() if worker.num_requests or worker.is_in_doubt]
        await asyncio.gather(*map(self._ask, busy))

    def listen(self) -> None:
        """Set aside the workers that have vanished, and end their calls; call it every ``TICK_SECONDS``.

        If all workers of a role are silent, this process or its network is the likely reason, and no other
        worker could take over. Then only the probes decide.
        """
        heard = [worker for worker in self._workers.values() if not worker.is_set_aside]
        for worker in self._pulses.tick(heard):
            if self._has_substitute(worker):
                _log.warning("worker_vanished", worker=worker.worker_id, silence=worker.pulse.silence)
                self.set_aside(worker)
                self._replace_connection(worker)

    def draining(self, role: str) -> list[Worker]:
        """Return the workers of a role that drain: they finish their requests and take no new ones."""
        return [w for w in self._workers.values() if w.role == role and w.is_draining]

    async def set_draining(
        self, worker: Worker, is_draining: bool, tell: Callable[[], Awaitable[Any]]
    ) -> None:
        """Start or end the draining of a worker; on return, this set has the new state too.

        No refresh runs meanwhile: a refresh that had read the membership earlier would undo the change.

        Args:
            tell: sends the change to the worker.
        """
        async with self._refreshing:
            await tell()
            self._mark(worker, is_draining)

    def set_role(self, worker: Worker, role: str) -> None:
        """Place new requests by the role that a worker says it has; ignore an unknown role."""
        if role in ROLES and role != worker.role:
            worker.role = role
            _log.info("worker_changed_role", worker=worker.worker_id, role=role)
            self._tell_return(worker)

    async def close(self) -> None:
        """Close every channel."""
        tasks = [*self._watches.values(), *self._asking.values(), *self._asked_again.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._pulses.close(), return_exceptions=True)
        connections = [worker.connection for worker in self._workers.values()]
        self._workers.clear()
        await asyncio.gather(*(c.channel.close(grace=None) for c in connections), *self._closing)

    async def _members(self) -> Sequence[Member]:
        try:
            members = await self._membership.members()
        except MembershipLost as error:
            if not self._is_membership_lost:
                _log.warning("membership_lost", error=error, kept_workers=len(self._workers))
            self._is_membership_lost = True
            return [Member(address, is_draining=w.is_draining) for address, w in self._workers.items()]
        if self._is_membership_lost:
            _log.info("membership_back", members=len(members))
        self._is_membership_lost = False
        return members

    async def _update(self, address: str, records: Sequence[Member]) -> None:
        """Bring the worker at an address up to date; a restarted worker has two records for a while."""
        worker = self._workers.get(address)
        if worker is None:
            await self._meet(address, records)
            return
        is_its_record = [worker.info.epoch] == [record.epoch for record in records]
        known = (worker.is_draining, worker.role)
        is_same = is_its_record and known == (records[0].is_draining, records[0].role or worker.role)
        if is_same and not worker.connection.is_doubted:
            return
        # The worker may be about to stop and would refuse requests: prefer others until it has answered.
        worker.is_asked_to_stay = not records
        probe = await self._ask(worker)
        worker.is_asked_to_stay = False
        if probe is None:
            if is_its_record:
                self._mark(worker, records[0].is_draining)
            return
        worker.connection.is_doubted = False
        if probe.info.epoch != worker.info.epoch:
            self._leave(worker, "restarted")
            await self._meet(address, records)
        elif not records and probe.is_stopping:
            self._leave(worker, "lease_ended")
        else:
            # The worker's own answer counts, because the record may lag behind it.
            self._mark(worker, probe.info.is_draining)

    async def _meet(self, address: str, records: Sequence[Member]) -> None:
        """Probe the address of a new record, and let its worker join if it stays and is accepted."""
        if not records:
            return
        connection = WorkerConnection.to(address, self._connect)
        try:
            probe = await probe_worker(connection, self._trust, self._probe_seconds)
        except (grpc.aio.AioRpcError, ChannelClosedError):
            probe = None
        if probe is not None and not probe.is_stopping:
            member = next((record for record in records if record.epoch == probe.info.epoch), records[0])
            may_change = all(worker.is_draining for worker in self._workers.values())
            if self._acceptance.accepts(member, probe, may_change=may_change):
                connection.sign_as(self._caller, probe.info)
                self._join(Worker(address, probe.info, connection, is_draining=probe.info.is_draining))
                return
        await connection.channel.close(grace=None)

    async def _ask(self, worker: Worker) -> Probe | None:
        """Probe a worker and return its answer, or None if there is none.

        A worker that does not answer for ``silent_seconds`` leaves, and its calls end.
        """
        begin, role = self._clock(), worker.role
        code = None
        try:
            probe = await probe_worker(worker.connection, self._trust, self._probe_seconds)
        except StrangerError:
            if self._workers.get(worker.address) is worker:
                self._leave(worker, "stranger")
            return None
        except (grpc.aio.AioRpcError, ChannelClosedError) as error:
            probe, code = None, error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        if self._workers.get(worker.address) is not worker:
            return None
        if probe is not None:
            worker.silent_since, worker.num_unanswered = None, 0
            worker.answered_at = max(worker.answered_at, begin)
            if probe.info.epoch == worker.info.epoch:
                self._set_stalled(worker, probe.info.is_stalled)
                # The answer may be older than a role that was learned while the probe was on its way.
                if worker.role == role:
                    self.set_role(worker, probe.info.role)
                if worker.is_set_aside:
                    self._take_back(worker, probe)
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            worker.num_unanswered += 1
            worker.silent_since = begin if worker.silent_since is None else worker.silent_since
            # One late answer may be this process's own delay; a second unanswered probe rules that out.
            if worker.num_unanswered > 1 and self._clock() - worker.silent_since >= self._silent_seconds:
                self._leave(worker, "silent")
                worker.is_lost = True
                self._close_soon(worker.connection)
        elif code is not None:
            self._leave(worker, "no_answer")
        return probe

    async def _ask_until_answered(self, worker: Worker) -> None:
        try:
            while worker.is_set_aside and self._workers.get(worker.address) is worker:
                await self._ask(worker)
                if worker.is_set_aside:
                    await asyncio.sleep(ASK_AGAIN_SECONDS)
        finally:
            del self._asking[worker]

    async def _until_answered(self, worker: Worker) -> None:
        await asyncio.wait([self.set_aside(worker)])

    def _take_back(self, worker: Worker, probe: Probe) -> None:
        """Use a worker again that was set aside, unless its answer says that it is about to end."""
        worker.is_set_aside = False
        worker.pulse.hear()
        _log.info("worker_answers", worker=worker.worker_id)
        self._mark(worker, worker.is_draining or probe.info.is_draining)
        self._tell_return(worker)

    def _tell_return(self, worker: Worker) -> None:
        if worker.can_serve:
            for notice in self._on_return:
                notice()

    def _join(self, worker: Worker) -> None:
        self._acceptance.joined(worker.info)
        self._workers[worker.address] = worker
        _log.info("worker_joined", worker=worker.worker_id, role=worker.role, address=worker.address)
        watch = watch_worker(worker, self.router_id, self._hear, self._until_answered)
        self._watches[worker] = asyncio.create_task(watch)
        self._tell_return(worker)

    def _leave(self, worker: Worker, reason: str) -> None:
        del self._workers[worker.address]
        self._watches.pop(worker).cancel()
        _log.warning("worker_left", worker=worker.worker_id, address=worker.address, reason=reason)
        for forget in self._on_leave:
            forget(worker.worker_id)
        # Closing the channel would end the requests that still run over it.
        worker.has_left = True
        if worker.num_requests == 0:
            self._close_soon(worker.connection)

    def _mark(self, worker: Worker, is_draining: bool) -> None:
        if worker.is_draining != is_draining:
            if self.reference and worker.info.cache_descriptor != self.reference.cache_descriptor:
                self._leave(worker, "other_arithmetic")
                return
            worker.is_draining = is_draining
            _log.info("worker_draining" if is_draining else "worker_serving", worker=worker.worker_id)
            self._tell_return(worker)
            for notice in self._on_drain if is_draining else ():
                notice(worker)

    def _hear(self, worker: Worker, report: worker_pb2.WatchWorkerResponse) -> None:
        if not worker.is_set_aside:
            worker.pulse.hear()
        last, worker.last_report = worker.last_report, report
        worker.load_of_others = report.load_of_others
        self._set_stalled(worker, report.is_stalled)
        # Only a change counts: a report that was in flight while this router changed the state is outdated.
        if report.is_draining != last.is_draining:
            self._mark(worker, report.is_draining)
        if report.role != last.role:
            self.set_role(worker, report.role)

    def _set_stalled(self, worker: Worker, is_stalled: bool) -> None:
        if worker.is_stalled != is_stalled:
            worker.is_stalled = is_stalled
            log = _log.warning if is_stalled else _log.info
            log("worker_stalled" if is_stalled else "worker_moves", worker=worker.worker_id)
            self._tell_return(worker)
        if is_stalled and worker.num_requests and self._has_substitute(worker):
            self._replace_connection(worker)

    async def _reach(self, worker: Worker) -> None:
        """Return once a new connection to a worker has been made."""
        async with WorkerConnection.to(worker.address, self._connect).channel as channel:
            await channel.channel_ready()

    def _replace_connection(self, worker: Worker) -> None:
        """End the calls to a worker, so that their requests continue on other workers."""
        self._close_soon(worker.connection)
        worker.connection = WorkerConnection.to(worker.address, self._connect)
        worker.connection.sign_as(self._caller, worker.info)

    def _has_substitute(self, worker: Worker) -> bool:
        """Return whether other workers can take over; decode workers can compute prompts too."""
        others = {*self.live(worker.role), *self.live("decode")} - {worker}
        return any(not other.is_in_doubt for other in others)

    def _close_soon(self, connection: WorkerConnection) -> None:
        task = asyncio.create_task(connection.channel.close(grace=None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
