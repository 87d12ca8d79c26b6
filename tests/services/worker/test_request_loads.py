"""The load that a worker reports to each router: what the other routers have sent, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import worker_pb2
from quire.services.worker.reports import worker_reports
from quire.services.worker.reports.request_loads import RequestLoads
from quire.services.worker.reports.worker_reports import LOAD_SECONDS, WorkerReports
from quire.services.worker.state import WorkerState

ROUTERS = ("a", "b", "")


def load_of(router_id: str, pending_tokens: int = 0, resident_tokens: int = 0) -> worker_pb2.RequestLoad:
    return worker_pb2.RequestLoad(
        router_id=router_id, pending_tokens=pending_tokens, resident_tokens=resident_tokens
    )


requests = st.tuples(
    st.sampled_from(ROUTERS), st.integers(0, 100), st.integers(0, 100), st.booleans(), st.booleans()
)


@given(st.lists(requests, max_size=12), st.randoms(use_true_random=False))
def test_each_router_gets_the_sum_of_the_others_requests(
    asked: list[tuple[str, int, int, bool, bool]], order: object
) -> None:
    loads = RequestLoads(Mock())
    running: dict[str, tuple[str, int, int]] = {}

    def check() -> None:
        for router_id in ROUTERS:
            others = [each for each in running.values() if each[0] != router_id or not router_id]
            told = loads.of_others(router_id)
            assert told.num_requests == len(others)
            assert told.pending_tokens == sum(pending for _, pending, _ in others)
            assert told.resident_tokens == sum(resident for _, _, resident in others)

    with ExitStack() as stack:
        for number, (router_id, pending, resident, is_resident, computes) in enumerate(asked):
            load, name = load_of(router_id, pending, resident), str(number)
            stack.enter_context(loads.counted(name, load, is_resident=is_resident, computes_prompt=computes))
            running[name] = (router_id, pending if computes else 0, resident if is_resident else 0)
            check()
            if pending % 2:
                loads.record_computed(name)
                running[name] = (router_id, 0, running[name][2])
                check()
    running.clear()
    check()
    assert not loads.of_others("").num_requests


async def reported(reports: AsyncGenerator[worker_pb2.WatchWorkerResponse, None]) -> tuple[bool, int]:
    report = await asyncio.wait_for(anext(reports), 5)
    return report.is_stalled, report.load_of_others.num_requests


async def test_reports_are_repeated_though_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_reports, "BEAT_SECONDS", 0.01)
    async with aclosing(WorkerReports(WorkerState("decode")).follow("a")) as told:
        assert [await reported(told) for _ in range(3)] == [(False, 0)] * 3


async def test_load_is_sent_in_time_and_a_stall_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_reports, "BEAT_SECONDS", 3600.0)
    state = WorkerState("decode")
    reports = WorkerReports(state)
    async with aclosing(reports.follow("a")) as told:
        assert await reported(told) == (False, 0)
        with ExitStack() as stack:
            for number in range(3):
                counted = reports.loads.counted(
                    str(number), load_of("b"), is_resident=True, computes_prompt=False
                )
                stack.enter_context(counted)
            assert await reported(told) == (False, 3)
            monkeypatch.setattr(worker_reports, "LOAD_SECONDS", 3600.0)
            stack.enter_context(
                reports.loads.counted("4", load_of("b"), is_resident=True, computes_prompt=False)
            )
            state.set_stalled(True)
            assert await reported(told) == (True, 4)


async def test_a_routers_own_requests_cause_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_reports, "BEAT_SECONDS", 3600.0)
    reports = WorkerReports(WorkerState("decode"))
    async with aclosing(reports.follow("a")) as told:
        assert await reported(told) == (False, 0)
        waiting = asyncio.create_task(anext(told))
        with reports.loads.counted("1", load_of("a", 5, 5), is_resident=True, computes_prompt=True):
            await asyncio.sleep(3 * LOAD_SECONDS)
        assert not waiting.done()
        reports.close()
        await asyncio.wait([waiting])
        assert isinstance(waiting.exception(), StopAsyncIteration)
