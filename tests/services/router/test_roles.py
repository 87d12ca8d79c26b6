"""A router changes the roles of its workers: for an operator, and by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.client import NotFound, Unavailable, Unsupported
from quire.client.admin import AdminClient
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.routing.elastic_roles import REVERSAL_SECONDS, RoleChange
from quire.routing.pressure import Pressure
from quire.rpc.errors import FailedPrecondition
from quire.services.router.admin import roles as roles_module
from quire.services.router.workers import probe, probing
from quire.services.router.workers.membership import Member
from tests.testing.router_parts import ScriptedMembership
from tests.testing.until import until

REQUEST = pb.GenerateRequest(generation=pb.Generation(text="say"))


def ids(cluster: Any, role: str) -> list[str]:
    return sorted(worker.worker_id for worker in cluster.running.workers.live(role))


async def test_new_requests_follow_the_role_when_the_call_returns(pair: Any) -> None:
    stub = await pair.start(poll_seconds=3600)
    with AdminClient(pair.running.admin_address) as admin:
        await asyncio.to_thread(admin.change_role, "d1", "prefill")
        assert (ids(pair, "prefill"), ids(pair, "decode")) == (["d1", "p1", "p2"], ["d2"])
        await asyncio.to_thread(admin.change_role, "p1", "decode")
        await asyncio.to_thread(admin.change_role, "p2", "decode")
        await asyncio.to_thread(admin.change_role, "d2", "prefill")
        assert (ids(pair, "prefill"), ids(pair, "decode")) == (["d1", "d2"], ["p1", "p2"])
        await stub.Generate(REQUEST)
    assert any(isinstance(call, worker_pb2.DecodeRequest) for w in ("p1", "p2") for call in pair[w].calls)
    assert any(isinstance(call, worker_pb2.PrefillRequest) for w in ("d1", "d2") for call in pair[w].calls)
    assert pair.metric("quire_role_changes_total", role="prefill", cause="operator") == 2
    assert pair.metric("quire_role_changes_total", role="decode", cause="operator") == 2


async def test_the_last_decode_worker_keeps_its_role(pair: Any) -> None:
    await pair.start(poll_seconds=3600)
    with AdminClient(pair.running.admin_address) as admin:
        await asyncio.to_thread(admin.drain, "d1")
        with pytest.raises(Unsupported, match="no decode worker that takes requests") as refused:
            await asyncio.to_thread(admin.change_role, "d2", "prefill")
        assert refused.value.reason == "LAST_DECODE_WORKER"
        assert pair["d2"].role == "decode"
        await asyncio.to_thread(admin.drain, "d1", undo=True)
        both = (asyncio.to_thread(admin.change_role, name, "prefill") for name in ("d1", "d2"))
        results = await asyncio.gather(*both, return_exceptions=True)
    assert sum(isinstance(result, Unsupported) for result in results) == 1
    assert len(ids(pair, "decode")) == 1


async def test_an_impossible_change_of_role_is_named(pair: Any, fault: Any) -> None:
    await pair.start(poll_seconds=3600)
    with AdminClient(pair.running.admin_address) as admin:
        with pytest.raises(NotFound, match="d1, d2, p1, p2"):
            await asyncio.to_thread(admin.change_role, "d9", "prefill")
        with pytest.raises(Exception, match="must be prefill or decode"):
            await asyncio.to_thread(admin.change_role, "d1", "both")  # type: ignore[arg-type]
        pair["d1"].fault = fault(0, FailedPrecondition("it became one 3 s ago"))
        with pytest.raises(Unsupported, match="d1 keeps its role: it became one 3 s ago") as refused:
            await asyncio.to_thread(admin.change_role, "d1", "prefill")
        assert refused.value.reason == "ROLE_TOO_NEW"
        pair["d1"].fault = fault(0)
        with pytest.raises(Unavailable, match="d1 keeps its role: scripted"):
            await asyncio.to_thread(admin.change_role, "d1", "prefill")
    assert ids(pair, "decode") == ["d1", "d2"]


async def test_a_change_that_another_router_made_is_followed(pair: Any) -> None:
    await pair.start()
    pair["d1"].role = "prefill"
    await until(lambda: ids(pair, "decode") == ["d2"])
    assert ids(pair, "prefill") == ["d1", "p1", "p2"]


async def test_a_waiting_request_continues_when_a_worker_becomes_a_decode_worker(cluster: Any) -> None:
    for name in ("p1", "p2"):
        await cluster.add(name, "prefill")
    await cluster.add("d1", "decode")
    stub = await cluster.start(poll_seconds=3600, worker_wait_seconds=10.0)
    with AdminClient(cluster.running.admin_address) as admin:
        await asyncio.to_thread(admin.drain, "d1")
        waiting = asyncio.ensure_future(stub.Generate(REQUEST))
        await until(lambda: cluster.metric("quire_router_requests_waiting"))
        await asyncio.to_thread(admin.change_role, "p2", "decode")
        async with asyncio.timeout(5):
            await waiting


class ScriptedController:
    """Wants the changes that the test sets, once."""

    def __init__(self, *_: Any) -> None:
        self.pressure = Pressure(1.5, 0.5, 0.1)
        self.wanted: list[RoleChange] = []

    def decide(self, workers: Any, totals: Any) -> list[RoleChange]:
        wanted, self.wanted = self.wanted, []
        return wanted


async def test_a_router_changes_roles_by_itself(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ScriptedController()
    monkeypatch.setattr("quire.services.router.app.ElasticRoles", lambda *_: controller)
    monkeypatch.setattr(roles_module, "DECISION_SECONDS", 0.01)
    await pair.start(elastic_roles=True)
    controller.wanted = [
        RoleChange("d1", "prefill", REVERSAL_SECONDS, "ttft", "too slow"),
        RoleChange("d2", "prefill", REVERSAL_SECONDS, "ttft", "too slow"),
    ]
    await until(lambda: ids(pair, "decode") == ["d2"])
    await until(lambda: pair.metric("quire_role_changes_total", role="prefill", cause="ttft"))
    await asyncio.sleep(0.1)
    assert ids(pair, "decode") == ["d2"], "the last one stays, whatever the controller wants"
    assert pair.metric("quire_role_pressure_ratio", kind="ttft") == 1.5
    with AdminClient(pair.running.admin_address) as admin:
        status = await asyncio.to_thread(admin.elastic_roles)
    assert status.startswith("TTFT 150%")
    assert "d1 became prefill" in status
    assert "too slow" in status


async def test_without_the_setting_nothing_decides(pair: Any) -> None:
    await pair.start()
    with AdminClient(pair.running.admin_address) as admin:
        assert await asyncio.to_thread(admin.elastic_roles) == ""


async def test_an_elastic_router_replaces_the_last_decode_worker(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles_module, "DECISION_SECONDS", 0.01)
    monkeypatch.setattr("quire.routing.elastic_roles.SUSTAINED_SECONDS", 0.05)
    await cluster.add("p1", "prefill")
    await cluster.add("p2", "prefill")
    await cluster.add("d1", "decode")
    stub = await cluster.start(elastic_roles=True, worker_wait_seconds=10.0)
    await cluster["d1"].server.stop()
    async with asyncio.timeout(10):
        await stub.Generate(REQUEST)
    assert (ids(cluster, "decode"), ids(cluster, "prefill")) == (["p1"], ["p2"])


async def test_a_role_in_the_membership_makes_the_router_ask(cluster: Any) -> None:
    worker = await cluster.add("d1", "decode")
    await cluster.add("d2", "decode")
    await cluster.start(poll_seconds=3600)
    workers = cluster.running.workers
    worker.role = "prefill"
    workers._membership = ScriptedMembership(Member(worker.server.address, worker.epoch, role="prefill"))
    await workers.refresh()
    assert ids(cluster, "prefill") == ["d1"]


async def test_an_answer_that_is_older_than_the_role_does_not_undo_it(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.start(poll_seconds=3600)
    workers = pair.running.workers
    [worker] = [worker for worker in workers.live("decode") if worker.worker_id == "d1"]
    probe_worker = probe.probe_worker

    async def probe_late(*arguments: Any) -> Any:
        answer = await probe_worker(*arguments)
        workers.set_role(worker, "prefill")
        return answer

    monkeypatch.setattr(probing, "probe_worker", probe_late)
    with workers.dispatched(worker):
        await workers.ask_busy()
    assert ids(pair, "prefill") == ["d1", "p1", "p2"]
