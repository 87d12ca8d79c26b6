"""The state of a worker: who changes it, and who learns of a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import worker_pb2
from quire.rpc.errors import FailedPrecondition, InvalidArgument
from quire.services.worker.parts import WorkerParts
from quire.services.worker.reports.worker_reports import WorkerReports
from quire.services.worker.servicer import WorkerServicer
from quire.services.worker.state import DrainState, WorkerState


def values(state: WorkerState) -> tuple[str, DrainState, bool]:
    return state.role, state.drain, state.is_stalled


EVENTS: dict[str, Callable[[WorkerState], None]] = {
    "prefill": lambda state: state.change_role("prefill"),
    "decode": lambda state: state.change_role("decode"),
    "drain": lambda state: state.set_draining(True),
    "undrain": lambda state: state.set_draining(False),
    "stop": WorkerState.stop,
    "stall": lambda state: state.set_stalled(True),
    "move": lambda state: state.set_stalled(False),
}


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=20))
def test_each_change_is_announced_once_and_nothing_else_is(events: list[str]) -> None:
    state, announced = WorkerState("decode"), []
    state.call_on_change(lambda: announced.append(values(state)))
    expected = []
    for event in events:
        before = values(state)
        EVENTS[event](state)
        if values(state) != before:
            expected.append(values(state))
    assert announced == expected
    if "stop" in events:
        assert state.drain is DrainState.STOPPING


def test_an_operator_drains_a_worker_and_undoes_it() -> None:
    state, announce = WorkerState("decode"), Mock()
    state.call_on_change(lambda: announce(state.is_draining))
    found = []
    for is_draining in (True, True, False, False, True):
        state.set_draining(is_draining)
        found.append((state.is_draining, state.is_stopping))
    assert found == [(True, False), (True, False), (False, False), (False, False), (True, False)]
    assert announce.mock_calls == [call(True), call(False), call(True)]


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_worker_that_stops_cannot_be_undrained(is_draining: bool) -> None:
    state = WorkerState("decode")
    state.stop()
    state.set_draining(is_draining)
    assert state.drain is DrainState.STOPPING
    assert (state.is_draining, state.is_stopping) == (True, True)


def test_a_role_that_was_changed_recently_does_not_change() -> None:
    now = 0.0
    state = WorkerState("decode", lambda: now)
    state.change_role("prefill", min_seconds_in_role=30)
    now = 29.0
    with pytest.raises(FailedPrecondition, match="became a prefill worker 29 s ago") as refused:
        state.change_role("decode", min_seconds_in_role=30)
    assert (refused.value.reason, state.role) == ("ROLE_TOO_NEW", "prefill")
    state.change_role("decode")
    assert state.role == "decode"
    now = 59.0
    state.change_role("prefill", min_seconds_in_role=30)
    assert state.role == "prefill"


def test_there_are_two_roles() -> None:
    state, announce = WorkerState("decode"), Mock()
    state.call_on_change(announce)
    with pytest.raises(InvalidArgument, match="prefill or decode"):
        state.change_role("both")
    assert state.role == "decode"
    announce.assert_not_called()


async def test_routers_that_watch_learn_each_change_at_once(make_parts: Callable[..., WorkerParts]) -> None:
    state = WorkerState("decode")
    reports = WorkerReports(state)
    parts = make_parts(state=state, reports=reports)
    servicer = WorkerServicer(parts, Mock(), Mock())
    watching = servicer.WatchWorker(worker_pb2.WatchWorkerRequest(), Mock())
    assert (await anext(watching)).role == "decode"
    await servicer.SetRole(worker_pb2.SetRoleRequest(role="prefill"), Mock())
    async with asyncio.timeout(5):
        assert (await anext(watching)).role == "prefill"
    state.set_stalled(True)
    async with asyncio.timeout(5):
        report = await anext(watching)
    assert (report.role, report.is_stalled) == ("prefill", True)
    await servicer.SetDraining(worker_pb2.SetDrainingRequest(is_draining=True), Mock())
    async with asyncio.timeout(5):
        assert (await anext(watching)).is_draining
    reports.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watching)
