"""The router sends prompts only to workers that prove the cluster secret."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.server import GrpcServer
from quire.services.router.workers.membership import Member, StaticMembership
from quire.services.router.workers.worker_set import WorkerSet
from tests.testing.intruder import Intruder, serving
from tests.testing.router_parts import ScriptedMembership
from tests.testing.rpc_errors import error_of

SECRET = b"the secret of the cluster"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


def worker_set(stack: AsyncExitStack, membership: Any, secret: bytes = SECRET) -> WorkerSet:
    workers = WorkerSet(
        membership, expected_fingerprint=lambda descriptor: "print", trust=ClusterTrust(secret)
    )
    stack.push_async_callback(workers.close)
    return workers


def ids_of(workers: WorkerSet) -> list[str]:
    return sorted(worker.worker_id for worker in workers.all())


def member(server: GrpcServer) -> Member:
    return Member(server.address, "1", fingerprint="print")


def refusals(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Return the logged problem of each address; none may have two."""
    logged = [vars(record)["fields"] for record in caplog.records if record.message == "worker_refused"]
    problems = {fields["address"]: fields["problem"] for fields in logged}
    assert len(problems) == len(logged)
    return problems


async def serve(stack: AsyncExitStack, intruder: Intruder, port: int = 0) -> GrpcServer:
    server = await stack.enter_async_context(serving(intruder, port))
    await server.ready()
    return server


@pytest.mark.parametrize("changes", [{}, {"worker_id": "intruder"}, {"num_blocks": 10**6, "epoch": "2"}])
async def test_a_worker_joins_and_an_intermediary_that_forwards_its_proof_does_not(
    cluster: Any, stack: AsyncExitStack, changes: dict[str, Any]
) -> None:
    honest = await cluster.add("d1", "decode", secret=SECRET)
    intruder = Intruder(honest.server.address, **changes)
    server = await serve(stack, intruder)
    workers = worker_set(stack, ScriptedMembership(member(honest.server), member(server)))
    for _ in range(3):
        await workers.refresh()
    assert (ids_of(workers), intruder.num_asked, intruder.prompts) == (["d1"], 3, [])


async def test_a_refusal_is_logged_once_with_its_remedy(
    cluster: Any, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    other = await cluster.add("d1", "decode", secret=b"another")
    none = await cluster.add("d2", "decode")
    workers = worker_set(stack, ScriptedMembership(member(other.server), member(none.server)))
    for _ in range(3):
        await workers.refresh()
    assert ids_of(workers) == []
    problems = refusals(caplog)
    assert set(problems) == {other.server.address, none.server.address}
    assert "has another cluster secret" in problems[other.server.address]
    assert "did not prove" in problems[none.server.address]
    assert all("QUIRE_CLUSTER_SECRET (--cluster-secret)" in problem for problem in problems.values())


async def test_records_of_an_intruder_do_not_fill_the_log(
    cluster: Any, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    honest = await cluster.add("d1", "decode", secret=SECRET)
    intruder = Intruder(honest.server.address)
    server = await serve(stack, intruder)
    memberships = ScriptedMembership()
    workers = worker_set(stack, memberships)
    for number in range(5):
        intruder.changes = {"epoch": str(number), "worker_id": f"intruder-{number}"}
        memberships.current = [Member(server.address, str(number), fingerprint=f"print-{number}")]
        await workers.refresh()
    assert list(refusals(caplog)) == [server.address]
    memberships.current = []
    await workers.refresh()
    assert workers._acceptance._refused == {}


async def test_an_operator_can_name_a_worker_by_another_address(cluster: Any, stack: AsyncExitStack) -> None:
    honest = await cluster.add("d1", "decode", secret=SECRET)
    port = honest.server.port
    workers = worker_set(stack, StaticMembership([f"localhost:{port}"]))
    await workers.refresh()
    (joined,) = workers.all()
    assert (joined.address, joined.peer_address) == (f"localhost:{port}", f"127.0.0.1:{port}")
    await joined.stub.Abort(worker_pb2.AbortRequest(), timeout=5)


async def test_a_stranger_with_the_lease_and_address_of_a_dead_worker_is_dropped(
    cluster: Any, stack: AsyncExitStack
) -> None:
    honest = await cluster.add("d1", "decode", secret=SECRET)
    other = await cluster.add("d2", "decode", secret=SECRET)
    workers = worker_set(stack, ScriptedMembership(member(honest.server)))
    await workers.refresh()
    (joined,) = workers.all()
    # Without this, the watch may find the intruder and close the channel before the call does.
    workers._watches[joined].cancel()
    await honest.server.stop()
    intruder = Intruder(other.server.address, worker_id="d1", address=honest.server.address)
    await serve(stack, intruder, honest.server.port)
    call = joined.stub.Decode(worker_pb2.DecodeRequest(), timeout=5, wait_for_ready=True)
    await error_of(joined.connection.check(call), text="did not prove")
    await workers.refresh()
    assert workers.all() == []


async def test_a_stranger_at_the_address_of_a_dead_worker_is_detected(cluster: Any) -> None:
    """Its answers reach no client, and the router does not keep it."""
    honest = await cluster.add("d1", "decode", secret=SECRET)
    other = await cluster.add("d2", "decode", secret=SECRET)
    stub = await cluster.start(cluster_secret=SECRET, poll_seconds=60.0, worker_wait_seconds=1.0)
    await other.begin_to_stop()
    workers = cluster.running.workers
    await workers.refresh()
    await honest.server.stop()
    intruder = Intruder(other.server.address)
    await serve(cluster.stack, intruder, honest.server.port)
    intruder.changes = {"worker_id": "d1", "epoch": "1"}
    generation = pb.Generation(token_ids=pb.TokenIds(ids=range(2, 12)))
    caught = await error_of(stub.Generate(pb.GenerateRequest(generation=generation), timeout=5))
    assert caught.code() is grpc.StatusCode.UNAVAILABLE
    await workers.refresh()
    assert all(worker.worker_id != "d1" for worker in workers.all())
    await other.serve_again()
    await workers.refresh()
    answer = await stub.Generate(pb.GenerateRequest(generation=generation), timeout=5)
    assert list(answer.choices[0].token_ids) == cluster.script.answer
