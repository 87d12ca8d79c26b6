"""Who a worker takes calls from, and whom a router takes for a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from quire.protos import worker_pb2 as pb
from quire.protos import worker_pb2_grpc
from quire.rpc import proof
from quire.rpc.cluster_proof import (
    MAX_CALLERS,
    MAX_NONCE_CHARS,
    WINDOW,
    ClusterTrust,
    RequireProof,
    SeenCounts,
    description_proof,
)
from quire.rpc.errors import InvalidArgument
from quire.rpc.proof import Caller, Peer
from quire.rpc.server import GrpcServer, Service, grpc_server
from tests.testing.rpc_errors import error_of

SECRET = b"the secret of the cluster"
EPOCH = "e0"
GET_LOAD = "/quire.v1.WorkerService/GetLoad"


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Counts what reaches it."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def GetWorkerInfo(self, request: Any, context: Any) -> pb.GetWorkerInfoResponse:
        return pb.GetWorkerInfoResponse(epoch=EPOCH)

    async def GetLoad(self, request: Any, context: Any) -> pb.GetLoadResponse:
        self.num_calls += 1
        return pb.GetLoadResponse(num_running=7)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[pb.DecodeResponse]:
        self.num_calls += 1
        for _ in range(2):
            yield pb.DecodeResponse()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
async def server(worker: Worker) -> AsyncIterator[GrpcServer]:
    service = Service(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "quire.v1.WorkerService")
    guard = RequireProof(SECRET, EPOCH, lambda: running.address)
    async with grpc_server(
        [service], registry=CollectorRegistry(), grace_seconds=0, interceptors=[guard]
    ) as running:
        await running.ready()
        yield running


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


def stub_of(channel: Any) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel)


async def test_calls_that_prove_the_secret_pass(
    server: GrpcServer, channel: grpc.aio.Channel, worker: Worker
) -> None:
    peer = Peer(channel, Caller(SECRET), server.address, EPOCH)
    load = await stub_of(peer).GetLoad(pb.GetLoadRequest(), metadata=(("traceparent", "kept"),))
    assert load.num_running == 7
    decode = stub_of(peer).Decode(pb.DecodeRequest(), timeout=5)
    await peer.check(decode)
    assert len([message async for message in decode]) == 2
    assert worker.num_calls == 2


@pytest.mark.parametrize("call", ["GetLoad", "Decode", "Abort"])
async def test_a_stranger_is_refused_before_its_request_is_read(
    channel: grpc.aio.Channel, worker: Worker, call: str
) -> None:
    request = {"GetLoad": pb.GetLoadRequest, "Decode": pb.DecodeRequest, "Abort": pb.AbortRequest}[call]()
    asked = getattr(stub_of(channel), call)(request, timeout=5)
    error = await error_of(asked)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "QUIRE_CLUSTER_SECRET (--cluster-secret)" in str(error.details())
    assert worker.num_calls == 0


async def test_health_and_the_description_are_open(channel: grpc.aio.Channel) -> None:
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert (await stub_of(channel).GetWorkerInfo(pb.GetWorkerInfoRequest(), timeout=5)).epoch == EPOCH


async def test_errors_of_another_secret_and_another_epoch_differ(
    server: GrpcServer, channel: grpc.aio.Channel, worker: Worker
) -> None:
    other = Peer(channel, Caller(b"another secret"), server.address, EPOCH)
    error = await error_of(stub_of(other).GetLoad(pb.GetLoadRequest(), timeout=5))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "not of this worker's cluster secret" in str(error.details())
    before = Peer(channel, Caller(SECRET), server.address, "before")
    error = await error_of(stub_of(before).GetLoad(pb.GetLoadRequest(), timeout=5))
    assert (error.code(), "restarted" in str(error.details())) == (grpc.StatusCode.UNAVAILABLE, True)
    assert worker.num_calls == 0


@pytest.mark.parametrize(
    "text", ["x", "e0", "e0 a 1", "e0 a 1 00", "e0 a x y z", " " * 9, "e0 a 1 " + "f" * 64]
)
async def test_nonsense_is_no_proof(channel: grpc.aio.Channel, worker: Worker, text: str) -> None:
    metadata = ((proof.PROOF_KEY, text),)
    error = await error_of(stub_of(channel).GetLoad(pb.GetLoadRequest(), metadata=metadata, timeout=5))
    assert error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)
    assert worker.num_calls == 0


async def test_a_proof_that_was_overheard_opens_nothing(channel: grpc.aio.Channel, worker: Worker) -> None:
    metadata = ((proof.PROOF_KEY, Caller(SECRET).sign(GET_LOAD, EPOCH)),)
    await stub_of(channel).GetLoad(pb.GetLoadRequest(), metadata=metadata, timeout=5)
    error = await error_of(stub_of(channel).GetLoad(pb.GetLoadRequest(), metadata=metadata, timeout=5))
    assert (error.code(), "used before" in str(error.details())) == (grpc.StatusCode.UNAVAILABLE, True)
    overheard = ((proof.PROOF_KEY, Caller(SECRET).sign(GET_LOAD, EPOCH)),)
    error = await error_of(stub_of(channel).ClearCache(pb.ClearCacheRequest(), metadata=overheard, timeout=5))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert worker.num_calls == 1


async def test_an_answer_is_valid_only_for_the_address_of_its_server(
    server: GrpcServer, channel: grpc.aio.Channel
) -> None:
    """A stranger at another address can pass a call on to a worker, but not the worker's answer back."""
    peer = Peer(channel, Caller(SECRET), "10.0.0.66:9000", EPOCH)
    call = stub_of(peer).Decode(pb.DecodeRequest(), timeout=5)
    error = await error_of(peer.check(call), grpc.StatusCode.UNAUTHENTICATED)
    assert "10.0.0.66:9000 did not prove" in str(error.details())
    assert call.cancelled()


async def test_a_peer_without_a_secret_gives_no_answer() -> None:
    service = Service(worker_pb2_grpc.add_WorkerServiceServicer_to_server, Worker(), "quire.v1.WorkerService")
    async with (
        grpc_server([service], registry=CollectorRegistry(), grace_seconds=0) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        peer = Peer(channel, Caller(SECRET), server.address, EPOCH)
        error = await error_of(peer.check(stub_of(peer).GetLoad(pb.GetLoadRequest(), timeout=5)))
        assert "QUIRE_CLUSTER_SECRET" in str(error.details())
        unguarded = Peer(channel, Caller(), server.address, EPOCH)
        call = stub_of(unguarded).GetLoad(pb.GetLoadRequest(), timeout=5)
        await unguarded.check(call)
        assert (await call).num_running == 7


async def test_a_call_that_fails_for_another_reason_keeps_its_error(
    channel: grpc.aio.Channel, server: GrpcServer
) -> None:
    peer = Peer(channel, Caller(b"another secret"), server.address, EPOCH)
    call = stub_of(peer).GetLoad(pb.GetLoadRequest(), timeout=5)
    await peer.check(call)
    assert "not of this worker's cluster secret" in str((await error_of(call)).details())


def test_a_count_is_used_once_in_any_order() -> None:
    seen = SeenCounts()
    assert [seen.add("a", count) for count in (3, 1, 2, 2, 3, 1, 5, 4)] == [
        *(True, True, True),
        *(False, False, False),
        *(True, True),
    ]
    assert seen.add("b", 3)
    assert seen.add("a", 5 + WINDOW)
    assert not seen.add("a", 5), "too old to be known"
    assert seen.add("a", 6)
    assert not seen.add("a", 6)
    assert seen.add("a", 10**18)
    assert not seen.add("a", 5 + WINDOW)


def test_callers_are_forgotten_from_the_oldest_on() -> None:
    seen = SeenCounts()
    for caller in range(MAX_CALLERS + 1):
        assert seen.add(str(caller), 1)
    assert not seen.add("1", 1)
    assert len(seen._callers) == MAX_CALLERS


# --- whom a router takes for a worker ---------------------------------------------------------------------

ADDRESS = "10.0.0.5:9000"
NONCE = "drawn"


def described(secret: bytes = SECRET, nonce: str = NONCE, **changes: str) -> pb.GetWorkerInfoResponse:
    """Return what a worker with a secret says, changed on the way."""
    info = pb.GetWorkerInfoResponse(worker_id="w", role="decode", epoch=EPOCH, address=ADDRESS)
    if secret:
        info.proof = description_proof(secret, nonce, info)
    for name, value in changes.items():
        setattr(info, name, value)
    return info


def problem(
    info: pb.GetWorkerInfoResponse, trust: ClusterTrust, address: str = ADDRESS, *, by_operator: bool = False
) -> str:
    return trust.problem(address, NONCE, info, is_named_by_operator=by_operator) or ""


def test_a_worker_that_proves_itself_is_taken() -> None:
    trust = ClusterTrust(SECRET)
    assert problem(described(), trust) == ""
    assert problem(described(), trust, "decode.example:9000", by_operator=True) == ""


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (described(b""), "did not prove that it knows the cluster secret"),
        (described(b"another"), "has another cluster secret"),
        (described(nonce="an older one"), "has another cluster secret"),
        (described(worker_id="intruder"), "has another cluster secret"),
        (described(epoch="e1"), "has another cluster secret"),
        (described(role="prefill"), "has another cluster secret"),
        (described(address="10.0.0.66:9000"), "has another cluster secret"),
    ],
)
def test_others_are_refused_and_the_remedy_is_named(info: pb.GetWorkerInfoResponse, reason: str) -> None:
    text = problem(info, ClusterTrust(SECRET))
    assert reason in text
    assert "QUIRE_CLUSTER_SECRET (--cluster-secret)" in text


def test_a_proof_that_was_passed_on_is_of_another_address() -> None:
    assert ADDRESS in problem(described(), ClusterTrust(SECRET), "10.0.0.66:9000")


def test_without_a_secret_workers_are_on_this_machine_or_have_certificates() -> None:
    info = described(b"")
    assert "on another machine" in problem(info, ClusterTrust())
    assert "QUIRE_CLUSTER_SECRET" in problem(info, ClusterTrust())
    assert problem(info, ClusterTrust(has_tls=True)) == ""
    assert problem(info, ClusterTrust(), "127.0.0.1:9000") == ""
    assert problem(info, ClusterTrust(), "[::1]:9000") == ""
    assert "this router has none" in problem(described(), ClusterTrust(), "127.0.0.1:9000")


def test_a_nonce_is_short() -> None:
    description_proof(SECRET, "n" * MAX_NONCE_CHARS, pb.GetWorkerInfoResponse())
    with pytest.raises(InvalidArgument, match="nonce: must have at most 64 characters"):
        description_proof(SECRET, "n" * (MAX_NONCE_CHARS + 1), pb.GetWorkerInfoResponse())


def test_proofs_are_the_same_everywhere() -> None:
    """Other implementations can check themselves by these."""
    assert proof.call_proof(b"secret", GET_LOAD, "epoch", "caller", "1") == (
        "dca41106ea9ff13261c983c86654487d196aefba783043654c6c0069871a1c64"
    )
    assert proof.answer_proof(b"secret", "challenge", "epoch", "127.0.0.1:9000") == (
        "8c8daa07865572ea28eee7b197e0803bc7c472e58b6a32722ed9efb9402f96ab"
    )
    assert proof.proof(b"secret", "a", "bc") != proof.proof(b"secret", "ab", "c")
