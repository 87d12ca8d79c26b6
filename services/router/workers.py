"""The live workers: who they are, whether they answer, what the router has in flight there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.kvtransfer.channels import CHANNEL_OPTIONS
from quire.protos import worker_pb2, worker_pb2_grpc
from quire.services.log import get_logger
from quire.services.tls import Connect

PROBE_SECONDS = 2.0
PENALTY_SECONDS = 2.0
_MUST_BE_EQUAL = ("model", "max_model_len", "vocab_size", "layout", "cache_descriptor", "index_stride")

_log = get_logger("router")


class Member(NamedTuple):
    """A worker as the membership knows it."""

    address: str
    epoch: str | None = None
    """Proves together with a live lease that the worker is the one that joined; None: ask the worker."""
    is_draining: bool = False
    fingerprint: str | None = None


class MembershipLost(Exception):
    """Who is a member cannot be known now; says nothing about the workers."""


class Membership(Protocol):
    """Knows the addresses of the workers."""

    async def members(self) -> Sequence[Member]:
        """Return the members.

        Raises:
            MembershipLost: the source does not answer.
        """
        ...


class StaticMembership:
    """A fixed list of addresses, each asked for its health."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._members = [Member(address) for address in addresses]

    async def members(self) -> Sequence[Member]:
        """Return all of them."""
        return self._members


def worker_stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerServiceStub:
    """Return the worker's service over a channel."""
    return worker_pb2_grpc.WorkerServiceStub(channel)


@dataclass(eq=False, slots=True)
class Connection:
    """A channel to a worker and its stubs."""

    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.WorkerServiceStub
    health: health_pb2_grpc.HealthStub

    @classmethod
    def to(cls, address: str, connect: Connect) -> Connection:
        """Return an unconnected channel; it connects with its first call."""
        # Retries are the router's, which knows what was already sent to the client.
        channel = connect(address, options=[*CHANNEL_OPTIONS, ("grpc.enable_retries", 0)])
        return cls(channel, worker_stub(channel), health_pb2_grpc.HealthStub(channel))


@dataclass(eq=False, slots=True)
class Worker:
    """A worker that joined, and the router's account of it."""

    address: str
    info: worker_pb2.GetWorkerInfoResponse
    connection: Connection
    is_draining: bool = False
    has_left: bool = False
    shunned_until: float = 0.0
    num_requests: int = 0
    owed_tokens: int = 0
    """Tokens that it has to compute before first tokens."""
    kept_tokens: int = 0
    """Tokens of the sequences whose blocks it keeps."""

    @property
    def worker_id(self) -> str:
        """Unique name of the worker."""
        return self.info.worker_id

    @property
    def stub(self) -> worker_pb2_grpc.WorkerServiceStub:
        """The worker's service."""
        return self.connection.stub


class WorkerSet:
    """Follows the membership and keeps one channel for each worker.

    All workers must serve the first one's model with the same KV layout and block hashes; others are refused.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        expected_fingerprint: Callable[[bytes], str] | None = None,
        connect: Connect = grpc.aio.insecure_channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_leave: Callable[[str], None] = lambda worker_id: None
        """Hears of workers that have left."""
        self._membership = membership
        self._expected_fingerprint = expected_fingerprint
        self._connect = connect
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._refused: set[tuple[str, str]] = set()
        self._is_membership_lost = False
        self._closing: set[asyncio.Task[None]] = set()
        self._refreshing = asyncio.Lock()
        self.reference: worker_pb2.GetWorkerInfoResponse | None = None
        """The description of the first worker that joined."""

    def all(self) -> list[Worker]:
        """Return every worker, draining ones included."""
        return list(self._workers.values())

    def live(self, role: str) -> list[Worker]:
        """Return the workers of a role that take requests."""
        return [w for w in self._workers.values() if w.info.role == role and not w.is_draining]

    def is_shunned(self, worker: Worker) -> bool:
        """Return whether the worker failed a moment ago."""
        return self._clock() < worker.shunned_until

    def shun(self, worker: Worker) -> None:
        """Prefer other workers for a while."""
        worker.shunned_until = self._clock() + PENALTY_SECONDS

    @contextmanager
    def dispatched(
        self, worker: Worker, *, owed_tokens: int = 0, kept_tokens: int = 0
    ) -> Iterator[Callable[[], None]]:
        """Account a request and its tokens to a worker; the yielded call says: what is owed is computed."""
        worker.num_requests += 1
        worker.owed_tokens += owed_tokens
        worker.kept_tokens += kept_tokens
        left = owed_tokens

        def computed() -> None:
            nonlocal left
            worker.owed_tokens -= left
            left = 0

        try:
            yield computed
        finally:
            computed()
            worker.kept_tokens -= kept_tokens
            worker.num_requests -= 1
            if worker.has_left and worker.num_requests == 0:
                self._close_soon(worker.connection)

    async def refresh(self) -> None:
        """Bring the set up to date with the membership."""
        async with self._refreshing:
            records: dict[str, list[Member]] = {}
            for member in await self._members():
                records.setdefault(member.address, []).append(member)
            for worker in [w for w in self._workers.values() if w.address not in records]:
                self._leave(worker, "lease_ended")
            await asyncio.gather(*(self._update(address, found) for address, found in records.items()))

    async def close(self) -> None:
        """Close every channel."""
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
        """Bring the worker at an address up to date; a worker that restarts has two records for a while."""
        worker, member = self._workers.get(address), records[0]
        if worker is not None and [worker.info.epoch] == [record.epoch for record in records]:
            self._set_draining(worker, member.is_draining)
            return
        connection = worker.connection if worker is not None else Connection.to(address, self._connect)
        probe = await self._probe(connection)
        if probe is not None:
            member = next((record for record in records if record.epoch == probe.info.epoch), member)
        if worker is not None and probe is not None and probe.info.epoch == worker.info.epoch:
            self._set_draining(worker, member.is_draining or probe.is_draining)
            return
        if worker is not None:
            self._leave(worker, "no_answer" if probe is None else "restarted")
            connection = Connection.to(address, self._connect)
        if probe is None or not probe.is_serving or not self._accepts(member, probe.info):
            await connection.channel.close(grace=None)
            return
        is_draining = member.is_draining or probe.is_draining
        self._join(Worker(address, probe.info, connection, is_draining=is_draining))

    async def _probe(self, connection: Connection) -> _Probe | None:
        try:
            health = await connection.health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
            info = await connection.stub.GetWorkerInfo(
                worker_pb2.GetWorkerInfoRequest(), timeout=PROBE_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
        return _Probe(info, health.status == health_pb2.HealthCheckResponse.SERVING)

    def _accepts(self, member: Member, info: worker_pb2.GetWorkerInfoResponse) -> bool:
        problem = self._mismatch(member, info)
        if problem is None:
            return True
        if (member.address, info.epoch) not in self._refused:
            self._refused.add((member.address, info.epoch))
            _log.error("worker_refused", worker=info.worker_id, address=member.address, problem=problem)
        return False

    def _mismatch(self, member: Member, info: worker_pb2.GetWorkerInfoResponse) -> str | None:
        if info.role not in ("prefill", "decode"):
            return f"its role is {info.role!r}, neither prefill nor decode"
        if self.reference is not None:
            for name in _MUST_BE_EQUAL:
                ours, its = getattr(self.reference, name), getattr(info, name)
                if ours != its:
                    return f"its {name} is {its!r}, the first worker's is {ours!r}"
        if self._expected_fingerprint is not None and member.fingerprint is not None:
            expected = self._expected_fingerprint(info.cache_descriptor)
            if member.fingerprint != expected:
                return "its block hashes differ from ours: give all services the same cluster secret"
        return None

    def _join(self, worker: Worker) -> None:
        if self.reference is None:
            self.reference = worker.info
        self._workers[worker.address] = worker
        _log.info("worker_joined", worker=worker.worker_id, role=worker.info.role, address=worker.address)

    def _leave(self, worker: Worker, reason: str) -> None:
        del self._workers[worker.address]
        _log.warning("worker_left", worker=worker.worker_id, address=worker.address, reason=reason)
        self.on_leave(worker.worker_id)
        # Closing the channel would end the requests that still run over it.
        worker.has_left = True
        if worker.num_requests == 0:
            self._close_soon(worker.connection)

    def _set_draining(self, worker: Worker, is_draining: bool) -> None:
        if worker.is_draining != is_draining:
            worker.is_draining = is_draining
            _log.info("worker_draining" if is_draining else "worker_serving", worker=worker.worker_id)

    def _close_soon(self, connection: Connection) -> None:
        task = asyncio.create_task(connection.channel.close(grace=None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Probe(NamedTuple):
    info: worker_pb2.GetWorkerInfoResponse
    is_serving: bool

    @property
    def is_draining(self) -> bool:
        return self.info.is_draining or not self.is_serving
