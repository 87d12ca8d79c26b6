"""Tracks the workers of a router and their changes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from quire.kvindex.worker_record import ROLES
from quire.protos import worker_pb2
from quire.routing.policy import receiving
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.proof import Caller
from quire.rpc.tls import Connect
from quire.services.router.config import SILENT_SECONDS
from quire.services.router.workers.acceptance import Acceptance
from quire.services.router.workers.connections import Connections
from quire.services.router.workers.health import WorkerHealth
from quire.services.router.workers.membership import Member, Membership, MembershipLost
from quire.services.router.workers.probe import Probe
from quire.services.router.workers.probing import Probing
from quire.services.router.workers.silences import Silences
from quire.services.router.workers.watch import watch_worker
from quire.services.router.workers.worker import Worker, can_adapt, has_substitute, load_of
from quire.services.server.log import EventLogger

HELD = ("stalled", "silent")
"""States of workers whose requests make no progress."""

_log = EventLogger("router")


class WorkerSet:
    """Follows the membership and keeps one channel for each worker.

    A worker that answers stays until it reports that it is leaving. If its lease is gone, the router asks the
    worker itself, because Redis may have lost all leases at once.

    All workers must serve the model of the first worker; see ``Acceptance``. Their revisions may differ.
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
        trust = trust or ClusterTrust()
        self._clock = clock
        self._connections = Connections(connect, Caller(trust.secret), self._tell_return)
        self._probing = Probing(trust, silent_seconds, clock, self._hear_answer, self._leave)
        self._silences = Silences(clock, self._connections.reach)
        self._acceptance = Acceptance(trust, expected_fingerprint)
        self._workers: dict[str, Worker] = {}
        self._num_named: Counter[str] = Counter()
        self._is_membership_lost = False
        self.expects_workers = False
        """Whether the membership lists workers that have not joined."""
        self._on_leave: list[Callable[[str], None]] = []
        self._on_return: list[Callable[[], None]] = []
        self._on_drain: list[Callable[[Worker], None]] = []
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._refreshing = asyncio.Lock()

    def call_on_leave(self, forget: Callable[[str], None]) -> None:
        """Call a function with the id of each worker that leaves from now on."""
        self._on_leave.append(forget)

    def call_on_return(self, notice: Callable[[], None]) -> None:
        """Call a function whenever a worker has joined or accepts requests again."""
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
        return [w for w in self._workers.values() if w.role == role and not w.health.is_draining]

    def serving(self, role: str | None = None) -> list[Worker]:
        """Return the workers that may get requests, all or those of a role; see ``Worker.can_serve``."""
        return [w for w in self._workers.values() if role in (None, w.role) and w.can_serve]

    def receiving(self) -> list[str]:
        """Return the revisions of which workers get new requests; see ``quire.routing.policy``."""
        by_role = ([worker.revision for worker in self.serving(role)] for role in ("prefill", "decode"))
        return receiving(*by_role)

    def states(self) -> dict[Worker, str]:
        """Return each worker's state in a word; "waiting": it could serve, but its revision is incomplete."""
        receiving = self.receiving()
        states = {worker: _state(worker) for worker in self.all()}
        return {
            worker: "waiting" if state == "serving" and worker.revision not in receiving else state
            for worker, state in states.items()
        }

    async def loads(self, seconds: float) -> list[tuple[Worker, worker_pb2.GetLoadResponse | None]]:
        """Return the workers with their loads; None for one that takes no requests or is too slow."""

        async def ask(worker: Worker) -> worker_pb2.GetLoadResponse | None:
            may_answer = worker.can_serve or worker.health.is_draining
            return await load_of(worker, seconds) if may_answer else None

        workers = self.all()
        found = zip(workers, await asyncio.gather(*map(ask, workers)), strict=True)
        # A worker may have left while others answered.
        present = self.all()
        return [(worker, load) for worker, load in found if worker in present]

    def decode_problem(self) -> str | None:
        """Return why no decode worker can serve a request now; None if one can.

        A request may still be placed on a worker that is silent, since another may not exist, but it waits.
        """
        states = Counter(_state(worker) for worker in self._workers.values() if worker.role == "decode")
        if "serving" in states:
            return None
        if not states:
            return "there is no decode worker"
        listed = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        return f"no decode worker can serve: {listed}"

    def num_held(self) -> int:
        """Return the number of requests on workers that make no progress."""
        return sum(each.num_requests for each in self._workers.values() if _state(each) in HELD)

    def adapters(self) -> dict[str, str]:
        """Return the digests of the adapters by name; empty if prefill and decode workers have no common one.

        While other weights are loaded under a name, the digest is that which most workers have.
        """
        digests: dict[str, Counter[str]] = defaultdict(Counter)
        for worker in self.all():
            for name, digest in worker.adapters.items():
                digests[name][digest] += 1
        return {name: self._agreed(counts) for name, counts in digests.items()}

    def _agreed(self, digests: Counter[str]) -> str:
        """Return the most frequent digest that can be served by the workers of all roles that there are."""
        by_role = [[w for w in self.all() if w.role == role] for role in ROLES]
        agreed = [
            digest
            for digest in digests
            if all(any(can_adapt(w, digest) for w in workers) for workers in by_role if workers)
        ]
        return max(agreed, key=lambda digest: (digests[digest], digest), default="")

    async def ask_again(self, since: float) -> None:
        """Ask the workers that may get requests, except those that have answered since a clock reading.

        Workers that have just ended then leave. A worker that does not answer keeps its old ``answered_at``.
        """
        await self._probing.ask_once(each for each in self.serving() if each.health.answered_at < since)

    def set_aside(self, worker: Worker) -> asyncio.Task[None]:
        """Give a worker no requests until it has answered a probe; return the task that asks it.

        Then other workers are preferred for another ``PENALTY_SECONDS``.
        """
        if worker.health.failed():
            _tell(worker)("worker_set_aside", worker=worker.worker_id)
        return self._probing.ask_until_answered(worker)

    @contextmanager
    def dispatched(
        self, worker: Worker, tenant: str = "", *, pending_tokens: int = 0, resident_tokens: int = 0
    ) -> Iterator[Callable[[], None]]:
        """Count a request and its tokens as in flight on a worker until the context ends.

        Call the yielded function once the prompt has been computed: it clears the pending prefill tokens.
        """
        worker.num_requests += 1
        worker.pending_tokens += pending_tokens
        worker.pending_by_tenant[tenant] += pending_tokens
        worker.resident_tokens += resident_tokens
        left = pending_tokens

        def computed() -> None:
            nonlocal left
            if left:
                worker.pending_tokens -= left
                worker.pending_by_tenant[tenant] -= left
                left = 0

        try:
            yield computed
        finally:
            computed()
            if not worker.pending_by_tenant[tenant]:
                del worker.pending_by_tenant[tenant]
            worker.resident_tokens -= resident_tokens
            worker.num_requests -= 1
            if worker.health.is_gone and worker.num_requests == 0:
                self._connections.close_soon(worker.connection)

    async def refresh(self) -> None:
        """Bring the set up to date with the membership."""
        async with self._refreshing:
            records: dict[str, list[Member]] = {}
            for member in await self._members():
                records.setdefault(member.address, []).append(member)
            self._acceptance.forget_all_but(records.keys())
            addresses = records.keys() | self._workers.keys()
            updates = (self._try_update(address, records.get(address, [])) for address in addresses)
            await asyncio.gather(*updates)
            self.expects_workers = not records.keys() <= self._workers.keys()

    async def ask_busy(self) -> None:
        """Probe the workers that have requests or a symptom; end the calls of those that do not serve.

        A lease is not enough for a busy worker: it expires late, and it stays alive when the engine is stuck.
        """
        busy = [each for each in self._workers.values() if each.num_requests or each.health.has_symptom]
        await asyncio.gather(*map(self._probing.ask, busy))

    def listen(self) -> None:
        """Set aside the workers that have vanished, and end their calls; call it every ``TICK_SECONDS``."""
        for worker in self._silences.tick(self.all()):
            _log.warning("worker_vanished", worker=worker.worker_id, silence=worker.health.silence)
            self.set_aside(worker)
            self._connections.replace(worker)

    def draining(self, role: str) -> list[Worker]:
        """Return the workers of a role that drain: they finish their requests and take no new ones."""
        return [w for w in self._workers.values() if w.role == role and w.health.is_draining]

    async def set_draining(
        self, worker: Worker, is_draining: bool, tell: Callable[[], Awaitable[Any]]
    ) -> None:
        """Start or end the draining of a worker; on return, this set has recorded the new state.

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
            self._name(worker)
            _log.info("worker_changed_role", worker=worker.worker_id, role=role)
            self._tell_return(worker)

    async def close(self) -> None:
        """Let every worker leave, and close its channel."""
        for watch in self._watches.values():
            watch.cancel()
        ends = (self._probing.close(), self._silences.close())
        await asyncio.gather(*self._watches.values(), *ends, return_exceptions=True)
        workers = self.all()
        self._workers.clear()
        for worker in workers:
            worker.health.left()
        await self._connections.close(worker.connection for worker in workers)

    async def _members(self) -> Sequence[Member]:
        try:
            members = await self._membership.members()
        except MembershipLost as error:
            if not self._is_membership_lost:
                _log.warning("membership_lost", error=error, kept_workers=len(self._workers))
            self._is_membership_lost = True
            return [Member(address, is_draining=w.health.is_draining) for address, w in self._workers.items()]
        if self._is_membership_lost:
            _log.info("membership_back", members=len(members))
        self._is_membership_lost = False
        return members

    async def _try_update(self, address: str, records: Sequence[Member]) -> None:
        """Bring the worker at an address up to date; an address that raises must not hide other workers."""
        try:
            await self._update(address, records)
        except Exception as error:
            _log.error("worker_not_updated", address=address, error=error)

    async def _update(self, address: str, records: Sequence[Member]) -> None:
        """Bring the worker at an address up to date; a restarted worker has two records for a while."""
        worker = self._workers.get(address)
        if worker is None:
            await self._meet(address, records)
            return
        health = worker.health
        is_its_record = [worker.info.epoch] == [record.epoch for record in records]
        known = (health.is_draining, worker.role)
        is_same = is_its_record and known == (records[0].is_draining, records[0].role or worker.role)
        if is_same and not health.may_be_stranger:
            return
        # The worker may be about to stop and would refuse requests: prefer others until it has answered.
        if not records:
            health.lease_ended()
        probe = await self._probing.ask(worker)
        health.lease_checked()
        if probe is None:
            if is_its_record:
                self._mark(worker, records[0].is_draining)
            return
        health.proved()
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
        connection = self._connections.open(address)
        if probe := await self._probing.meet(connection):
            member = next((record for record in records if record.epoch == probe.info.epoch), records[0])
            if self._acceptance.accepts(member, probe):
                health = WorkerHealth(self._clock, is_draining=probe.info.is_draining)
                worker = Worker(address, probe.info, connection, health)
                self._connections.prepare(worker)
                # While the stream was opened, another worker may have become the first.
                is_open = await connection.outputs.opened(self._probing.probe_seconds)
                if is_open and self._acceptance.accepts(member, probe):
                    self._join(worker)
                    return
        await connection.close()

    def _tell_return(self, worker: Worker) -> None:
        if worker.can_serve:
            for notice in self._on_return:
                notice()

    def _join(self, worker: Worker) -> None:
        self._acceptance.joined(worker.info)
        self._workers[worker.address] = worker
        self._name(worker)
        name, revision = worker.worker_id, worker.revision
        _log.info("worker_joined", worker=name, role=worker.role, revision=revision, address=worker.address)
        watch = watch_worker(worker, self.router_id, self._hear_report, self.set_aside)
        self._watches[worker] = asyncio.create_task(watch)
        self._tell_return(worker)

    def _name(self, worker: Worker) -> None:
        """Give a worker the next label of its role; no other worker ever gets the same."""
        self._num_named[worker.role] += 1
        worker.label = f"{worker.role[0].upper()}{self._num_named[worker.role]}"

    def _leave(self, worker: Worker, reason: str) -> None:
        if self._workers.get(worker.address) is not worker:
            return
        del self._workers[worker.address]
        self._watches.pop(worker).cancel()
        _tell(worker)("worker_left", worker=worker.worker_id, address=worker.address, reason=reason)
        for forget in self._on_leave:
            forget(worker.worker_id)
        worker.health.left()
        # Closing the channel would end the requests that still run over it.
        if worker.health.is_lost or worker.num_requests == 0:
            self._connections.close_soon(worker.connection)

    def _mark(self, worker: Worker, is_draining: bool) -> None:
        if not worker.health.reported_draining(is_draining):
            return
        _log.info("worker_draining" if is_draining else "worker_serving", worker=worker.worker_id)
        self._tell_return(worker)
        for notice in self._on_drain if is_draining else ():
            notice(worker)

    def _hear_answer(self, worker: Worker, probe: Probe, role: str, begin: float) -> None:
        """Apply a worker's answer to a probe that was sent at ``begin``, when the worker had ``role``."""
        if probe.info.epoch != worker.info.epoch:
            return
        self._set_stalled(worker, probe.info.is_stalled)
        # The answer may be older than a role that was learned while the probe was on its way.
        if worker.role == role:
            self.set_role(worker, probe.info.role)
        if worker.health.returned(begin):
            _log.info("worker_answers", worker=worker.worker_id)
            self._mark(worker, worker.health.is_draining or probe.info.is_draining)
            self._tell_return(worker)

    def _hear_report(self, worker: Worker, report: worker_pb2.WatchWorkerResponse) -> None:
        worker.health.heard()
        last, worker.last_report = worker.last_report, report
        worker.load_of_others = report.load_of_others
        if report.adapters != last.adapters:
            worker.set_adapters(report.adapters)
        self._set_stalled(worker, report.is_stalled)
        # Only a change counts: a report that was in flight while this router changed the state is outdated.
        if report.is_draining != last.is_draining:
            self._mark(worker, report.is_draining)
        if report.role != last.role:
            self.set_role(worker, report.role)

    def _set_stalled(self, worker: Worker, is_stalled: bool) -> None:
        if worker.health.reported_stalled(is_stalled):
            log = _log.warning if is_stalled else _log.info
            log("worker_stalled" if is_stalled else "worker_moves", worker=worker.worker_id)
            self._tell_return(worker)
        if is_stalled and worker.num_requests and has_substitute(worker, self.all()):
            self._connections.replace(worker)


def _state(worker: Worker) -> str:
    health = worker.health
    if health.is_draining:
        return "draining"
    if health.is_stalled:
        return "stalled"
    if health.has_vanished:
        return "silent"
    return "serving" if worker.can_serve else "set aside"


def _tell(worker: Worker) -> Callable[..., None]:
    """Return how to log that a worker does not answer: nothing is wrong if it was told to drain."""
    return _log.info if worker.health.is_draining else _log.warning
