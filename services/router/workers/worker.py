"""Describes one worker as a router sees it: its connection, its health, and the router's work in flight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from quire.kvindex.block_hash import revision
from quire.protos import worker_pb2, worker_pb2_grpc
from quire.rpc.channels import CHANNEL_OPTIONS, ChannelClosedError, closed_channel_errors
from quire.rpc.proof import Caller, Peer
from quire.rpc.tls import Connect
from quire.services.router.workers.health import WorkerHealth
from quire.services.router.workers.output_reader import OutputReader

CALL_SECONDS = 5.0
"""Time limit of calls that a worker answers at once."""
PING_OPTIONS = [
    # Workers that vanish are noticed by their silence (``silences.py``). These pings, and the
    # TCP_USER_TIMEOUT that gRPC sets with them, end what that cannot see: a single connection that is broken,
    # and the connections to workers that have left.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 7_000),
    ("grpc.http2.ping_timeout_ms", 7_000),
    # Channels to the same worker share no connection, so a new channel is a new connection.
    ("grpc.use_local_subchannel_pool", 1),
]


def worker_stub(channel: grpc.aio.Channel | Peer) -> worker_pb2_grpc.WorkerServiceStub:
    """Return the worker's service over a channel."""
    return worker_pb2_grpc.WorkerServiceStub(channel)


@dataclass(eq=False, slots=True)
class WorkerConnection:
    """A channel to a worker, its stubs, and the stream of outputs that comes over it."""

    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.WorkerServiceStub
    health: health_pb2_grpc.HealthStub
    peer: Peer | None = None
    """Set once the worker has proved its identity; ``stub`` then signs its calls."""
    on_proof_missing: Callable[[], None] = lambda: None
    """Called when a call has failed before the worker has proved its identity; set together with ``peer``."""
    outputs: OutputReader = field(init=False)

    def __post_init__(self) -> None:
        self.outputs = OutputReader(self)

    @classmethod
    def to(cls, address: str, connect: Connect) -> WorkerConnection:
        """Return a connection to an address; its channel connects with the first call."""
        # gRPC must not retry: only the router knows what was already sent to the client.
        options = {**dict(CHANNEL_OPTIONS), **dict(PING_OPTIONS), "grpc.enable_retries": 0}
        channel = connect(address, options=list(options.items()))
        return cls(channel, worker_stub(channel), health_pb2_grpc.HealthStub(channel))

    async def close(self) -> None:
        """End the stream and all calls."""
        self.outputs.close()
        await self.channel.close(grace=None)

    def sign_as(
        self, caller: Caller, info: worker_pb2.GetWorkerInfoResponse, on_proof_missing: Callable[[], None]
    ) -> None:
        """Sign all later calls as ``caller``, for the worker that ``info`` describes."""
        self.peer = Peer(self.channel, caller, info.address, info.epoch)
        self.stub = worker_stub(self.peer)
        self.on_proof_missing = on_proof_missing

    async def check(self, call: Any) -> None:
        """Return once the call has reached the worker that proved its identity; see ``Peer.check``.

        Raises:
            AioRpcError: the call failed, or another process answered it.
        """
        if self.peer is None:
            return
        try:
            await self.peer.check(call)
        except grpc.aio.AioRpcError:
            self.on_proof_missing()
            raise


@dataclass(eq=False, slots=True)
class Worker:
    """A worker that joined, and the router's state for it."""

    address: str
    info: worker_pb2.GetWorkerInfoResponse
    connection: WorkerConnection
    health: WorkerHealth = field(default_factory=WorkerHealth)
    role: str = field(init=False)
    """Present role, by which it gets new requests; ``info`` has the one that it had when it joined."""
    last_report: worker_pb2.WatchWorkerResponse = field(default_factory=worker_pb2.WatchWorkerResponse)
    """Its latest report."""
    label: str = ""
    """Short name for clients, which must not see ids and addresses, as ``P1`` or ``D2``."""
    num_requests: int = 0
    """Number of this router's requests in flight on the worker."""
    pending_tokens: int = 0
    """Pending prefill tokens: those that it has to compute before the first tokens of its requests."""
    pending_by_tenant: Counter[str] = field(default_factory=Counter)
    """The same by tenant."""
    resident_tokens: int = 0
    """Resident tokens: those of the sequences whose blocks it keeps."""
    adapters: dict[str, str] = field(init=False)
    """Digests of its adapters by name."""
    revision: str = field(init=False)
    """Only workers of one revision work together."""
    load_of_others: worker_pb2.TotalLoad = field(default_factory=worker_pb2.TotalLoad)
    """Load of other routers' requests, as it reported last. The counts above are this router's own."""

    def __post_init__(self) -> None:
        self.role = self.info.role
        self.revision = revision(self.info.cache_descriptor)
        self.set_adapters(self.info.adapters)

    def set_adapters(self, adapters: Iterable[worker_pb2.Adapter]) -> None:
        """Take over the adapters that it reports."""
        self.adapters = {adapter.name: adapter.digest for adapter in adapters}

    @property
    def worker_id(self) -> str:
        """Unique id of the worker."""
        return self.info.worker_id

    @property
    def peer_address(self) -> str:
        """Address (host:port) at which other workers reach this one."""
        return self.info.address or self.address

    @property
    def can_serve(self) -> bool:
        """Whether it may get requests: their outputs have a stream, and nothing is known to be wrong."""
        return self.connection.outputs.is_open and self.health.can_serve

    def pending_before(self, tenant: str, num_tokens: int) -> int:
        """Return how many pending tokens it computes before a tenant's prompt; it serves tenants in turn.

        Requests of other routers count as those of one other tenant, if there are tenants.
        """
        others = [num for name, num in self.pending_by_tenant.items() if name != tenant]
        own = self.pending_tokens - sum(others)
        if tenant:
            others.append(self.load_of_others.pending_tokens)
        else:
            own += self.load_of_others.pending_tokens
        return own + sum(min(num, own + num_tokens) for num in others)

    @property
    def stub(self) -> worker_pb2_grpc.WorkerServiceStub:
        """Stub for calls to the worker's service over its present connection."""
        return self.connection.stub


def can_continue(info: worker_pb2.GetWorkerInfoResponse, descriptor: bytes) -> bool:
    """Return whether a worker continues answers of workers with a cache descriptor: it has their weights.

    Another arithmetic may compute other later tokens, but they are the same model's. Empty: any answers.
    """
    return not descriptor or _model_of(info.cache_descriptor) == _model_of(descriptor)


def _model_of(descriptor: bytes) -> bytes:
    """Return a cache descriptor without the name of the arithmetic."""
    return re.sub(rb'"arithmetic":"[^"]*",', b"", descriptor)


def can_adapt(worker: Worker, digest: str) -> bool:
    """Return whether a worker has the adapter of a digest; an empty digest stands for none."""
    return not digest or digest in worker.adapters.values()


def has_substitute(worker: Worker, workers: Iterable[Worker]) -> bool:
    """Return whether one of ``workers`` can take over answers; decode workers can compute prompts too."""
    return any(
        other.role in (worker.role, "decode") and not (other.health.is_draining or other.health.has_symptom)
        for other in workers
        if other is not worker and can_continue(other.info, worker.info.cache_descriptor)
    )


async def load_of(worker: Worker, seconds: float) -> worker_pb2.GetLoadResponse | None:
    """Return the load of a worker, or None if it does not answer within some seconds."""
    try:
        with closed_channel_errors():
            load: worker_pb2.GetLoadResponse = await worker.stub.GetLoad(
                worker_pb2.GetLoadRequest(), timeout=seconds
            )
            return load
    except (ChannelClosedError, grpc.aio.AioRpcError):
        return None
