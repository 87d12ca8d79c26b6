"""How calls become workers that start or leave, with a launcher that only notes what it is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from multiprocessing.connection import wait
from unittest.mock import Mock

import grpc
import pytest

from quire.protos import admin_pb2 as pb
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.services.launch.launcher import Event, LaunchError, NotStarted, Started, Stopped, Waitable
from quire.services.launch.scaling import MAX_CALLS, MOST, ScaleCall, ScaleServer, scale
from quire.services.local.child_processes import signals_held_back
from quire.services.worker.config import WorkerConfig

WAIT_SECONDS = 20.0


class Noted:
    """A launcher without processes, and the events that follow in turn."""

    host = "127.0.0.1"
    seconds: float | None = None

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.drained: list[str] = []

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        self.names |= set(configs)
        self.started += configs

    def stop(self, name: str) -> None:
        self.stopped.append(name)

    def waitables(self) -> list[Waitable]:
        return []

    def events(self) -> list[Event]:
        return []

    def scale(self, *events: Event, **num_workers: int) -> pb.ScaleWorkersResponse:
        following: Iterator[Event] = iter(events)
        make = Mock(return_value=WorkerConfig(model="m", role="decode"))
        response = scale(self, make, self.drained.append, lambda: [next(following)], num_workers)
        assert not list(following)
        return response


def test_workers_of_all_roles_stop_before_new_ones_take_their_processors() -> None:
    launcher = Noted("decode-0", "decode-1", "prefill-0")
    launcher.start = Mock(side_effect=lambda configs: launcher.stopped.append("started"))  # type: ignore[method-assign]
    left, started = Stopped("decode-1"), Started("prefill-1", None)
    launcher.scale(left, started, prefill=2, decode=1)
    assert launcher.stopped == ["decode-1", "started"]


def test_a_worker_that_cannot_be_configured_stops_no_other() -> None:
    launcher = Noted("decode-0", "decode-1", "prefill-0")
    make = Mock(side_effect=ValueError("--metrics-port must be from 0 to 65535"))
    with pytest.raises(ValueError, match="--metrics-port"):
        scale(launcher, make, launcher.drained.append, list, {"decode": 1, "prefill": 2})
    assert not launcher.stopped


def test_it_returns_when_all_new_workers_serve() -> None:
    launcher = Noted("prefill-0", "decode-0")
    response = launcher.scale(Started("decode-2", None), Started("decode-1", None), decode=3)
    assert launcher.started == ["decode-1", "decode-2"]
    assert response == pb.ScaleWorkersResponse(started=["decode-2", "decode-1"])


def test_the_highest_numbers_are_drained_and_end() -> None:
    launcher = Noted("prefill-0", *(f"decode-{index}" for index in range(11)))
    leaving = ["decode-10", "decode-9", "prefill-0"]
    response = launcher.scale(*(Stopped(name) for name in leaving), decode=9, prefill=0)
    assert launcher.drained == launcher.stopped == leaving
    assert response == pb.ScaleWorkersResponse(left=leaving)


def test_where_nothing_has_to_change_nothing_does() -> None:
    launcher = Noted("prefill-0", "decode-0")
    assert launcher.scale(decode=1) == launcher.scale() == pb.ScaleWorkersResponse()


@pytest.mark.parametrize(
    "wrong", [{"decode": 0}, {"decode": MOST + 1}, {"prefill": 2**32 - 1}, {"router": 1}]
)
def test_impossible_numbers_change_nothing(wrong: dict[str, int]) -> None:
    launcher = Noted("decode-0")
    with pytest.raises(LaunchError, match="prefill 0 to 256 and decode 1 to 256"):
        launcher.scale(**{"prefill": 1, **wrong})
    assert not launcher.started
    assert not launcher.drained


def test_a_worker_that_does_not_start_is_withdrawn() -> None:
    launcher = Noted("decode-0")
    failed = NotStarted("decode-1", RuntimeError("no memory"))
    with pytest.raises(LaunchError, match="decode-1 did not start: no memory"):
        launcher.scale(failed, Started("decode-2", None), Stopped("decode-1"), decode=3)
    assert launcher.drained == launcher.stopped == ["decode-1"]


def test_the_restart_of_another_worker_is_not_counted() -> None:
    again: list[Event] = [NotStarted("decode-0", RuntimeError("again")), Started("decode-0", None)]
    response = Noted("decode-0").scale(*again, Started("decode-1", None), decode=2)
    assert response == pb.ScaleWorkersResponse(started=["decode-1"])


def next_call(server: ScaleServer) -> ScaleCall:
    assert wait([server.calls.waitable], WAIT_SECONDS)
    [call] = server.calls.take()
    return call


@pytest.mark.parametrize("problem", [LaunchError("not so"), ValueError("not so"), OSError("not so")])
def test_a_call_gets_its_response_or_why_there_is_none(problem: Exception) -> None:
    server = ScaleServer()
    with server, grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor() as callers:
        request = pb.ScaleWorkersRequest(num_workers={"decode": 2})
        stub = AdminServiceStub(channel)
        first = callers.submit(stub.ScaleWorkers, request, timeout=WAIT_SECONDS)
        next_call(server).answer(lambda num_workers: pb.ScaleWorkersResponse(started=list(num_workers)))
        assert first.result() == pb.ScaleWorkersResponse(started=["decode"])
        second = callers.submit(stub.ScaleWorkers, request, timeout=WAIT_SECONDS)
        next_call(server).answer(Mock(side_effect=problem))
        with pytest.raises(grpc.RpcError, match="not so"):
            second.result()


def test_workers_change_for_a_caller_that_has_left_too() -> None:
    server = ScaleServer()
    with server, grpc.insecure_channel(server.address) as channel:
        waiting = AdminServiceStub(channel).ScaleWorkers.future(pb.ScaleWorkersRequest(num_workers={}))
        call = next_call(server)
        waiting.cancel()
        with pytest.raises(CancelledError):
            call.response.result(WAIT_SECONDS)
        scaled = Mock(return_value=pb.ScaleWorkersResponse())
        call.answer(scaled)
        scaled.assert_called_once_with({})


def test_calls_that_wait_when_the_server_stops_fail() -> None:
    server = ScaleServer()
    with grpc.insecure_channel(server.address) as channel:
        with server:
            waiting = AdminServiceStub(channel).ScaleWorkers.future(pb.ScaleWorkersRequest())
            next_call(server)
        assert waiting.exception(WAIT_SECONDS) is not None


def test_calls_before_the_context_are_refused_at_once() -> None:
    server = ScaleServer()
    with grpc.insecure_channel(server.address) as channel:
        stub = AdminServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="still starting"):
            stub.ScaleWorkers(pb.ScaleWorkersRequest(), timeout=WAIT_SECONDS)
    with server:
        pass  # stops it


def test_more_calls_than_may_wait_are_refused_at_once() -> None:
    with ScaleServer() as server, grpc.insecure_channel(server.address) as channel:
        stub, request = AdminServiceStub(channel), pb.ScaleWorkersRequest()
        waiting = []  # gRPC cancels calls that nobody refers to
        for _ in range(MAX_CALLS):
            waiting.append(stub.ScaleWorkers.future(request))
            next_call(server)
        with pytest.raises(grpc.RpcError, match="limit exceeded"):
            stub.ScaleWorkers(request, timeout=WAIT_SECONDS)


def test_its_threads_block_the_signals_that_were_held_back_at_its_start() -> None:
    blocked = set[int]()

    class Observed(ScaleServer):
        def ScaleWorkers(
            self, request: pb.ScaleWorkersRequest, context: grpc.ServicerContext
        ) -> pb.ScaleWorkersResponse:
            blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            return pb.ScaleWorkersResponse()

    with signals_held_back():
        server = Observed()
    with server, grpc.insecure_channel(server.address) as channel:
        AdminServiceStub(channel).ScaleWorkers(pb.ScaleWorkersRequest(), timeout=WAIT_SECONDS)
    assert blocked >= {signal.SIGINT, signal.SIGTERM}


def test_a_port_that_cannot_be_bound_is_a_system_error(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc_server = Mock(**{"add_insecure_port.side_effect": RuntimeError("Failed to bind")})
    monkeypatch.setattr(grpc, "server", Mock(return_value=grpc_server))
    with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1"):
        ScaleServer()
