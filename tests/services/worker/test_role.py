"""The role of a worker: who may change it, and what the routers are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from quire.protos import worker_pb2
from quire.rpc.errors import FailedPrecondition, InvalidArgument
from quire.services.worker.parts import WorkerParts
from quire.services.worker.role import WorkerRole
from quire.services.worker.servicer import WorkerServicer
from quire.services.worker.worker_reports import WorkerReports


def test_each_change_is_announced_once() -> None:
    announce = Mock()
    role = WorkerRole("decode", announce)
    role.change("decode")
    announce.assert_not_called()
    role.change("prefill")
    role.change("prefill")
    assert (role.present, announce.call_count) == ("prefill", 1)


def test_a_role_that_was_changed_recently_stays() -> None:
    now = 0.0
    role = WorkerRole("decode", Mock(), lambda: now)
    role.change("prefill", min_seconds_in_role=30)
    now = 29.0
    with pytest.raises(FailedPrecondition, match="became a prefill worker 29 s ago") as refused:
        role.change("decode", min_seconds_in_role=30)
    assert (refused.value.reason, role.present) == ("ROLE_TOO_NEW", "prefill")
    role.change("decode")
    assert role.present == "decode"
    now = 59.0
    role.change("prefill", min_seconds_in_role=30)
    assert role.present == "prefill"


def test_there_are_two_roles() -> None:
    role = WorkerRole("decode", Mock())
    with pytest.raises(InvalidArgument, match="prefill or decode"):
        role.change("both")
    assert role.present == "decode"


async def test_routers_that_watch_are_told_at_once(make_parts: Callable[..., WorkerParts]) -> None:
    reports = WorkerReports("decode")
    role = WorkerRole("decode", lambda: reports.tell_role(role.present))
    parts = make_parts(role=role, reports=reports)
    servicer = WorkerServicer(parts, Mock(), Mock())
    watching = servicer.WatchWorker(worker_pb2.WatchWorkerRequest(), Mock())
    assert (await anext(watching)).role == "decode"
    await servicer.SetRole(worker_pb2.SetRoleRequest(role="prefill"), Mock())
    async with asyncio.timeout(5):
        assert (await anext(watching)).role == "prefill"
    reports.tell_stalled(True)
    async with asyncio.timeout(5):
        report = await anext(watching)
    assert (report.role, report.is_stalled) == ("prefill", True)
    reports.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watching)
