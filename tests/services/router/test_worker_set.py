"""Who the router takes for alive, and what it asks of the index."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import grpc.aio
import pytest

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.router.execution.worker_calls import WorkerCalls
from quire.services.router.workers.health import PENALTY_SECONDS
from quire.services.router.workers.membership import Member, StaticMembership
from quire.services.router.workers.worker import Worker
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.background import background
from tests.testing.router_parts import ScriptedMembership, free_charge
from tests.testing.until import until


@pytest.fixture
async def make_set() -> AsyncIterator[Any]:
    sets = []

    def make(membership: Any, **options: Any) -> WorkerSet:
        sets.append(WorkerSet(membership, **options))
        return sets[-1]

    yield make
    for each in sets:
        await each.close()


def ids_of(workers: WorkerSet) -> list[str]:
    return sorted(w.worker_id for role in ("prefill", "decode") for w in workers.live(role))


async def joined(workers: WorkerSet, role: str = "decode") -> Worker:
    """Let a set ask its source; return the one worker that it finds."""
    await workers.refresh()
    (live,) = workers.live(role)
    return live


async def test_static_workers_join_drain_and_leave(cluster: Any, make_set: Any) -> None:
    first, second = await cluster.add("d1", "decode"), await cluster.add("d2", "decode")
    await second.begin_to_stop()
    workers = make_set(StaticMembership([first.server.address, second.server.address]))
    await workers.refresh()
    assert ids_of(workers) == ["d1"]
    await second.serve_again()
    await workers.refresh()
    assert ids_of(workers) == ["d1", "d2"]
    await first.begin_to_stop()
    await workers.refresh()
    assert ids_of(workers) == ["d2"]
    await second.server.stop()
    await workers.refresh()
    assert ids_of(workers) == []


async def test_an_address_that_raises_hides_no_other_worker(
    cluster: Any, make_set: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await cluster.add("d", "decode")
    workers = make_set(StaticMembership(["\ud800:2", worker.server.address]))
    await workers.refresh()
    assert ids_of(workers) == ["d"]
    assert "worker_not_updated" in caplog.text


@pytest.mark.parametrize(("is_drained", "level"), [(True, logging.INFO), (False, logging.WARNING)])
async def test_a_worker_that_was_drained_leaves_without_a_warning(
    cluster: Any, make_set: Any, caplog: pytest.LogCaptureFixture, is_drained: bool, level: int
) -> None:
    worker = await cluster.add("d", "decode")
    workers = make_set(StaticMembership([worker.server.address]))
    await workers.refresh()
    if is_drained:
        await worker.begin_to_stop()
        await workers.refresh()
    with caplog.at_level(logging.INFO, "quire.router"):
        await worker.server.stop()
        await workers.refresh()
    assert [each.levelno for each in caplog.records if each.message == "worker_left"] == [level]


async def test_a_record_that_lags_behind_does_not_undo_a_drain(cluster: Any, make_set: Any) -> None:
    worker = await cluster.add("d1", "decode")
    workers = make_set(ScriptedMembership(Member(worker.server.address, "1")))
    live = await joined(workers)

    async def tell() -> None:
        worker.is_draining = True

    await workers.set_draining(live, True, tell)
    assert (ids_of(workers), workers.draining("decode")) == ([], [live])
    await workers.refresh()
    assert ids_of(workers) == []
    # Another router has ended the drain before this one saw it in the record.
    worker.is_draining = False
    await workers.refresh()
    assert ids_of(workers) == ["d1"]


OTHERS: dict[str, Any] = {
    "model": "other",
    "max_model_len": 9,
    "vocab_size": 9,
    "eos_token_ids": [2],
    "text_digest": "other",
    "embedding": worker_pb2.EmbeddingModel(size=3),
}


@pytest.mark.parametrize("difference", ["role", "layout", "block_size", *OTHERS])
async def test_a_worker_whose_requests_would_be_others_is_refused(
    cluster: Any, make_set: Any, caplog: pytest.LogCaptureFixture, difference: str
) -> None:
    first, second = await cluster.add("d1", "decode"), await cluster.add("d2", "decode")
    # Another revision may differ in weights, arithmetic and the form of blocks, but not in these.
    second.cache_descriptor = b"tiny" if difference == "layout" else b"another"
    match difference:
        case "role":
            second.role = "both"
        case "layout":
            second.layout.dtype = "float16"
        case "block_size":
            second.layout.block_size = 8
        case _:
            second.described = worker_pb2.GetWorkerInfoResponse(**{difference: OTHERS[difference]})
    membership = ScriptedMembership(Member(first.server.address))
    workers = make_set(membership)
    await workers.refresh()
    membership.current = [Member(first.server.address), Member(second.server.address)]
    await workers.refresh()
    assert ids_of(workers) == ["d1"]
    (refused,) = (vars(each)["fields"] for each in caplog.records if each.message == "worker_refused")
    assert f"its {difference} is" in refused["problem"]
    assert difference == "role" or "start a router with its own Redis" in refused["problem"]


def give_arithmetic(worker: Any, name: str) -> None:
    worker.layout.arithmetic = name
    worker.cache_descriptor = b'{"arithmetic":"%s","block_size":4}' % name.encode()


@pytest.mark.parametrize(
    ("ours", "its", "remedy"),
    [
        ("float32-1", "amx-bf16-1", "--arithmetic portable"),
        ("float32-1/torch-2.13.0/AVX2", "amx-bf16-1/torch-2.13.0/AVX2", "--arithmetic portable"),
        ("float32-1/torch-2.13.0/AVX2", "float32-1/torch-2.13.0/AVX512", "processors of one kind"),
        (
            "float32-1/torch-2.13.0/transformers-5.17.0/AVX2",
            "float32-1/torch-2.13.0/transformers-5.23.0/AVX2",
            "one version of torch and transformers",
        ),
        ("float32-1", "triton-1/torch-2.13.0/sm_90", "processors of one kind"),
    ],
)
async def test_a_worker_with_another_arithmetic_waits_and_the_log_names_the_remedy(
    cluster: Any, make_set: Any, caplog: pytest.LogCaptureFixture, ours: str, its: str, remedy: str
) -> None:
    workers = [await cluster.add(name, "decode") for name in ("first", "second")]
    for worker, name in zip(workers, (ours, its), strict=True):
        give_arithmetic(worker, name)
    members = [Member(worker.server.address) for worker in workers]
    membership = ScriptedMembership(members[0])
    followed = make_set(membership)
    await followed.refresh()
    membership.current = members
    await followed.refresh()
    first, second = followed.all()
    assert followed.receiving() == [first.revision]
    assert followed.states() == {first: "serving", second: "waiting"}
    (warned,) = (
        vars(each)["fields"] for each in caplog.records if each.message == "worker_has_other_arithmetic"
    )
    assert f"its arithmetic is {its}, the first worker's is {ours}, so" in warned["details"]
    assert remedy in warned["details"]


async def test_a_revision_receives_once_it_is_complete_and_until_its_workers_leave(
    cluster: Any, make_set: Any
) -> None:
    membership = ScriptedMembership()
    workers = make_set(membership)

    async def add(name: str, role: str) -> list[str]:
        worker = await cluster.add(name, role, cache_descriptor=name[:3].encode())
        membership.current = [*(membership.current or ()), Member(worker.server.address, "1", role=role)]
        await workers.refresh()
        return states()

    def states() -> list[str]:
        return [f"{each.worker_id} {state}" for each, state in workers.states().items()]

    await add("old-p", "prefill")
    assert await add("old-d", "decode") == ["old-p serving", "old-d serving"]
    assert await add("new-p", "prefill") == ["old-p serving", "old-d serving", "new-p waiting"]
    old_p = workers.all()[0]
    old_p.health.failed()
    assert states() == ["old-p set aside", "old-d serving", "new-p waiting"], "capacity never goes to zero"
    old_p.health.returned(time.monotonic())
    assert (await add("new-d", "decode"))[2:] == ["new-p serving", "new-d serving"]
    assert len(workers.receiving()) == 2
    old_p.health.reported_draining(True)
    assert states() == ["old-p draining", "old-d waiting", "new-p serving", "new-d serving"]


async def test_a_worker_with_another_secret_is_refused(cluster: Any, make_set: Any) -> None:
    worker = await cluster.add("d1", "decode")
    membership = ScriptedMembership(Member(worker.server.address, "1", fingerprint="other"))
    workers = make_set(membership, expected_fingerprint=lambda descriptor: "ours")
    await workers.refresh()
    assert ids_of(workers) == []
    membership.current = [Member(worker.server.address, "1", fingerprint="ours")]
    worker.epoch = "2"
    await workers.refresh()
    assert ids_of(workers) == ["d1"]


@pytest.mark.parametrize(
    ("tenant", "pending", "of_others", "before"),
    [
        ("flood", {"flood": 10_000, "small": 50}, 0, 10_050),
        ("small", {"flood": 10_000, "small": 50}, 0, 50 + 100),
        ("new", {"flood": 10_000, "small": 20}, 900, 50 + 20 + 50),
        ("", {"": 10_000}, 900, 10_900),
    ],
)
def test_a_tenant_waits_for_as_much_of_each_other_as_for_its_own(
    tenant: str, pending: dict[str, int], of_others: int, before: int
) -> None:
    worker = Worker("h:1", worker_pb2.GetWorkerInfoResponse(), Mock())
    worker.pending_by_tenant.update(pending)
    worker.pending_tokens = sum(pending.values())
    worker.load_of_others.pending_tokens = of_others
    assert worker.pending_before(tenant, num_tokens=50) == before


async def test_a_stopping_worker_leaves_with_its_lease_and_its_requests_continue(
    cluster: Any, make_set: Any
) -> None:
    worker = await cluster.add("d1", "decode")
    membership = ScriptedMembership(Member(worker.server.address, "1"))
    workers = make_set(membership)
    live = await joined(workers)
    with workers.dispatched(live, pending_tokens=10, resident_tokens=20) as computed:
        assert (live.pending_tokens, live.resident_tokens) == (10, 20)
        computed()
        assert (live.pending_tokens, live.resident_tokens) == (0, 20)
        membership.current = []
        await worker.begin_to_stop()
        await workers.refresh()
        assert ids_of(workers) == []
        await live.stub.GetWorkerInfo(pb.GetModelInfoRequest(), timeout=5)
    assert live.pending_tokens == live.resident_tokens == live.num_requests == 0


async def test_a_lost_membership_keeps_the_healthy_workers(cluster: Any, make_set: Any) -> None:
    first, second = await cluster.add("d1", "decode"), await cluster.add("d2", "decode")
    membership = ScriptedMembership(Member(first.server.address, "1"), Member(second.server.address, "1"))
    workers = make_set(membership)
    await workers.refresh()
    membership.current = None
    await workers.refresh()
    assert ids_of(workers) == ["d1", "d2"]
    await first.server.stop()
    await workers.refresh()
    assert ids_of(workers) == ["d2"]


async def test_workers_that_serve_stay_without_their_leases(cluster: Any, make_set: Any) -> None:
    """Redis was flushed while one worker was drained, one restarted and one died."""
    added = [await cluster.add(f"d{index}", "decode") for index in range(4)]
    membership = ScriptedMembership(*(Member(worker.server.address, "1") for worker in added))
    workers = make_set(membership)
    await workers.refresh()
    _, drained, restarted, dead = added
    drained.is_draining = True
    restarted.epoch = "2"
    await dead.server.stop()
    membership.current = []
    await workers.refresh()
    assert ids_of(workers) == ["d0"]
    assert {each.worker_id: each.health.is_draining for each in workers.all()} == {"d0": False, "d1": True}
    assert not workers.live("decode")[0].health.is_unhealthy
    drained.is_draining = False
    membership.current = [Member(worker.server.address, worker.epoch) for worker in added]
    await workers.refresh()
    assert ids_of(workers) == ["d0", "d1", "d2"]


async def test_while_it_is_asked_whether_it_stays_others_are_preferred(cluster: Any, make_set: Any) -> None:
    worker = await cluster.add("d1", "decode")
    membership = ScriptedMembership(Member(worker.server.address, "1"))
    workers = make_set(membership)
    live = await joined(workers)
    membership.current = []
    worker.answers_probes.clear()
    refreshing = asyncio.create_task(workers.refresh())
    await until(lambda: live.health.has_symptom)
    assert live.health.is_unhealthy
    worker.answers_probes.set()
    await refreshing
    assert not live.health.is_unhealthy


async def decoding(calls: WorkerCalls, live: Any) -> None:
    """Begin a call that lasts."""
    sequence = worker_pb2.Sequence(sequence_id="r", token_ids=[5])
    calls.start(live, live.stub.Decode(worker_pb2.DecodeRequest(sequence=sequence)))
    assert (await calls.next()).message is not None


async def test_calls_of_a_worker_that_falls_silent_end(cluster: Any, make_set: Any) -> None:
    worker = await cluster.add("d1", "decode", pause_before_token=0)
    membership = ScriptedMembership(Member(worker.server.address, "1"))
    workers = make_set(membership, silent_seconds=0.3)
    live = await joined(workers)
    async with asyncio.timeout(10), background() as spawn, WorkerCalls("r", 0, spawn, free_charge()) as calls:
        with workers.dispatched(live):
            await decoding(calls, live)
            worker.answers_probes.clear()
            await workers.ask_busy()
            assert (ids_of(workers), live.health.is_unhealthy) == (["d1"], True)
            while ids_of(workers):
                await workers.ask_busy()
            event = await calls.next()
            assert event.error is not None
            assert event.error.code() is grpc.StatusCode.UNAVAILABLE
            assert live.health.is_lost
    worker.answers_probes.set()
    await workers.refresh()
    assert ids_of(workers) == ["d1"]


async def test_a_worker_that_misses_one_probe_stays(cluster: Any, make_set: Any) -> None:
    now = 0.0
    worker = await cluster.add("d1", "decode")
    membership = ScriptedMembership(Member(worker.server.address, "1"))
    workers = make_set(membership, silent_seconds=0.3, clock=lambda: now)
    live = await joined(workers)
    with workers.dispatched(live):
        worker.answers_probes.clear()
        asking = asyncio.create_task(workers.ask_busy())
        await asyncio.sleep(0)
        now = 100.0  # as if this process had been stopped
        await asking
        assert live.health.is_unhealthy
    worker.answers_probes.set()
    await workers.ask_busy()
    assert (workers.live("decode"), live.health.is_unhealthy) == ([live], False)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stalled_engine_is_set_aside_where_others_can_take_over(
    cluster: Any, make_set: Any, role: str
) -> None:
    stalled = await cluster.add("w1", role, pause_before_token=0)
    other = await cluster.add("d2", "decode")
    membership = ScriptedMembership(Member(stalled.server.address, "1"))
    workers = make_set(membership)
    live = await joined(workers, role)
    async with asyncio.timeout(10), background() as spawn, WorkerCalls("r", 0, spawn, free_charge()) as calls:
        with workers.dispatched(live):
            await decoding(calls, live)
            stalled.is_stalled = True
            await workers.ask_busy()
            assert live.health.is_unhealthy
            next_event = asyncio.create_task(calls.next())
            await asyncio.wait([next_event], timeout=0.1)
            assert not next_event.done()
            membership.current = [Member(stalled.server.address, "1"), Member(other.server.address, "1")]
            await workers.refresh()
            await workers.ask_busy()
            event = await next_event
            assert event.error is not None
            assert event.error.code() is grpc.StatusCode.UNAVAILABLE
    stalled.is_stalled = False
    await workers.ask_busy()
    assert (ids_of(workers), live.health.is_unhealthy) == (["d2", "w1"], False)


async def test_a_restarted_worker_is_a_new_one(cluster: Any, make_set: Any) -> None:
    worker = await cluster.add("d1", "decode")
    membership = ScriptedMembership(Member(worker.server.address, "1"))
    workers = make_set(membership)
    await workers.refresh()
    (before,) = workers.live("decode")
    worker.epoch = "2"
    membership.current = [Member(worker.server.address, "2")]
    await workers.refresh()
    (after,) = workers.live("decode")
    assert after is not before
    assert after.info.epoch == "2"


async def test_a_worker_that_restarts_twice_has_two_records_and_one_channel(
    cluster: Any, make_set: Any
) -> None:
    worker = await cluster.add("d1", "decode")
    address = worker.server.address
    opened: list[grpc.aio.Channel] = []

    def connect(address: str, **options: Any) -> grpc.aio.Channel:
        opened.append(grpc.aio.insecure_channel(address, **options))
        return opened[-1]

    left: list[str] = []
    membership = ScriptedMembership(Member(address, "1"))
    workers = make_set(membership, connect=connect)
    workers.call_on_leave(left.append)
    await workers.refresh()
    worker.epoch = "3"
    membership.current = [Member(address, "1", is_draining=True), Member(address, "2"), Member(address, "3")]
    live = await joined(workers)
    assert (live.info.epoch, left) == ("3", ["d1"])
    assert [channel is live.connection.channel for channel in opened] == [False, True]
    membership.current = []
    await worker.begin_to_stop()
    await workers.refresh()
    await workers.close()
    assert left == ["d1", "d1"]
    assert {channel.get_state() for channel in opened} == {grpc.ChannelConnectivity.SHUTDOWN}


async def test_refreshes_at_once_join_a_worker_once(cluster: Any, make_set: Any) -> None:
    worker = await cluster.add("d1", "decode")
    workers = make_set(StaticMembership([worker.server.address]))
    joined = []

    async def refresh() -> None:
        await workers.refresh()
        joined.extend(workers.all())

    await asyncio.gather(refresh(), refresh())
    assert joined[0] is joined[1]


async def test_a_penalty_passes(cluster: Any, make_set: Any) -> None:
    now = 100.0
    worker = await cluster.add("d1", "decode")
    workers = make_set(StaticMembership([worker.server.address]), clock=lambda: now)
    live = await joined(workers)
    await workers.set_aside(live)
    assert live.health.can_serve
    assert live.health.is_unhealthy
    now += PENALTY_SECONDS
    assert not live.health.is_unhealthy


async def test_after_the_end_of_a_set_its_workers_are_no_longer_asked(cluster: Any, make_set: Any) -> None:
    worker = await cluster.add("d1", "decode")
    workers = make_set(StaticMembership([worker.server.address]))
    live = await joined(workers)
    await workers.close()
    assert not live.health.can_serve
    async with asyncio.timeout(5):
        await workers.set_aside(live)
