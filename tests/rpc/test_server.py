"""The common server: health, errors, metrics, limits, the end."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc.errors import InvalidArgument, Unavailable
from quire.rpc.health import STARTING, Health
from quire.rpc.server import Draining, GrpcServer, Service, Stop, grpc_server, serve_until_signal
from quire.services.server.log import EventLogger, configure_logging
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

NAME = "quire.v1.GenerationService"


class Servicer(pb_grpc.GenerationServiceServicer):
    """Fails on demand."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.waits = asyncio.Event()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if request.text == "bad":
            raise InvalidArgument("text", "must not be bad", metadata={"limit": "good"})
        if request.text == "full":
            raise Unavailable("try later", retry_after_seconds=0.25)
        if request.text == "bug":
            raise KeyError("secret")
        return pb.TokenizeResponse(token_ids=[1])

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        try:
            yield pb.GenerateStreamResponse(text="a")
            self.entered.set()
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def GenerateBatch(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateBatchResponse]:
        """Abort the call when the client has left."""
        yield pb.GenerateBatchResponse()
        self.waits.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        self.cancelled.set()
        await context.abort(grpc.StatusCode.ABORTED, "too late")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
async def server(registry: CollectorRegistry, servicer: Servicer) -> AsyncIterator[GrpcServer]:
    services = [Service(pb_grpc.add_GenerationServiceServicer_to_server, servicer, NAME)]
    async with grpc_server(services, registry=registry, grace_seconds=0.1) as running:
        yield running


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


def details(error: grpc.aio.AioRpcError, *kinds: Any) -> list[Any]:
    found = []
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the error has all methods that are used
    for packed, kind in zip(status.details, kinds, strict=True):
        message = kind()
        assert packed.Unpack(message)
        found.append(message)
    return found


async def test_health_follows_ready(server: GrpcServer, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)

    async def status(service: str) -> int:
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(response.status)

    assert await status("") == await status(NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.ready()
    assert await status("") == await status(NAME) == health_pb2.HealthCheckResponse.SERVING
    await server.report(STARTING)
    assert await status(NAME) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_the_health_check_says_why(server: GrpcServer, channel: grpc.aio.Channel) -> None:
    async def told() -> dict[Any, Any]:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return dict(await call.trailing_metadata())

    await server.report(Health("stalled", "2 requests wait"))
    assert await told() == {"quire-status": "stalled", "quire-reason": "2 requests wait"}
    await server.ready()
    assert await told() == {"quire-status": "ready", "quire-reason": ""}


async def test_invalid_argument_names_the_field(channel: grpc.aio.Channel) -> None:
    caught = await error_of(pb_grpc.GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(text="bad")))
    assert caught.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.details() == "text: must not be bad"
    info, bad = details(caught, ErrorInfo, BadRequest)
    assert dict(info.metadata) == {"field": "text", "limit": "good"}
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "quire")
    assert bad.field_violations[0].field == "text"


async def test_unavailable_has_the_time_of_the_retry(channel: grpc.aio.Channel) -> None:
    caught = await error_of(pb_grpc.GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(text="full")))
    _, retry = details(caught, ErrorInfo, RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250


async def test_a_bug_is_internal_and_logged_and_its_details_are_not_sent(channel: grpc.aio.Channel) -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    caught = await error_of(pb_grpc.GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(text="bug")))
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.details())
    assert "event=call_failed method=Tokenize" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


async def test_calls_are_counted_by_code(
    channel: grpc.aio.Channel, registry: CollectorRegistry, servicer: Servicer
) -> None:
    stub = pb_grpc.GenerationServiceStub(channel)
    await stub.Tokenize(pb.TokenizeRequest(text="good"))
    await error_of(stub.Tokenize(pb.TokenizeRequest(text="bad")))
    call = stub.GenerateStream(pb.GenerateStreamRequest())
    await call.read()
    await asyncio.wait_for(servicer.entered.wait(), 5)
    call.cancel()
    await asyncio.wait_for(servicer.cancelled.wait(), 5)

    def count(method: str, code: str) -> float | None:
        labels = {"grpc_method": method, "grpc_code": code}
        return registry.get_sample_value("grpc_server_handled_total", labels)

    assert count("Tokenize", "OK") == count("Tokenize", "INVALID_ARGUMENT") == 1
    assert count("GenerateStream", "CANCELLED") == 1


async def test_an_error_after_a_disconnect_is_neither_sent_nor_logged(
    channel: grpc.aio.Channel, registry: CollectorRegistry, servicer: Servicer, caplog: Any
) -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    call = pb_grpc.GenerationServiceStub(channel).GenerateBatch(pb.GenerateBatchRequest())
    await call.read()
    # A call that is cancelled while it still sends a message ends at that message.
    await asyncio.wait_for(servicer.waits.wait(), 5)
    call.cancel()
    labels = {"grpc_method": "GenerateBatch", "grpc_code": "CANCELLED"}
    await servicer.cancelled.wait()
    await until(lambda: registry.get_sample_value("grpc_server_handled_total", labels))
    assert stream.getvalue() == ""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_signal_stops_the_server(server: GrpcServer, channel: grpc.aio.Channel) -> None:
    waiting = asyncio.create_task(serve_until_signal(server))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(waiting, 5)
    await error_of(pb_grpc.GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(text="good")))


def test_a_log_outlives_the_stderr_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    configure_logging("info")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    EventLogger("test").info("done")
    assert second.getvalue().endswith("event=done\n")


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("127.0.0.1", "another process has this port"),
        ("192.0.2.1", "this machine has no such address"),
        ("no-such-host.invalid", "is it an address of this machine?"),
    ],
)
async def test_an_address_that_cannot_be_bound_is_reported_with_its_remedy(host: str, remedy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=re.escape(remedy)):
            async with grpc_server([], host=host, port=port, registry=CollectorRegistry()):
                pass


async def test_while_it_drains_a_server_takes_calls(server: GrpcServer, channel: grpc.aio.Channel) -> None:
    stub = pb_grpc.GenerationServiceStub(channel)
    answers = []

    async def drain() -> None:
        answers.append(await stub.Tokenize(pb.TokenizeRequest(text="good")))
        health = health_pb2_grpc.HealthStub(channel)
        answers.append((await health.Check(health_pb2.HealthCheckRequest())).status)

    await server.ready()
    await server.stop(Stop(drain, lambda: 0, ignore))
    assert answers == [pb.TokenizeResponse(token_ids=[1]), health_pb2.HealthCheckResponse.NOT_SERVING]
    await error_of(stub.Tokenize(pb.TokenizeRequest(text="good")))


async def endless() -> None:
    await asyncio.Event().wait()


def ignore(waiting: Draining) -> None:
    """Do not report what the server waits for."""


async def test_draining_takes_no_longer_than_the_grace(server: GrpcServer, servicer: Servicer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = pb_grpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest())
        await call.read()
        await asyncio.wait_for(servicer.entered.wait(), 5)
        told: list[Draining] = []
        await asyncio.wait_for(server.stop(Stop(endless, lambda: 1, told.append)), 5)
        await asyncio.wait_for(servicer.cancelled.wait(), 5)
    assert [each.num_requests for each in told] == [1, 1]
    assert told[0].seconds_left > 0
    assert told[1].seconds_left == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_it_serves_a_process_ends_at_once(number: signal.Signals) -> None:
    """SIGINT has a handler too where it was ignored, as in the background of a script."""
    program = (
        "import signal\n"
        "from quire.rpc.server import end_on_signals\n"
        "end_on_signals()\n"
        "print('loading', flush=True)\n"
        "signal.pause()"
    )
    ignored = ["env", "--ignore-signal=INT", sys.executable, "-c", program]
    with subprocess.Popen(ignored, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(number)
        assert process.wait(10) == 128 + number


def test_the_second_signal_ends_a_process_that_drains() -> None:
    program = (
        "import asyncio\n"
        "from prometheus_client import CollectorRegistry\n"
        "from quire.rpc.server import Stop, grpc_server, serve_until_signal\n"
        "async def main():\n"
        "    async with grpc_server([], registry=CollectorRegistry(), grace_seconds=60) as server:\n"
        "        serving = asyncio.create_task(serve_until_signal(server, stop))\n"
        "        await asyncio.sleep(0)\n"
        "        print('serving', flush=True)\n"
        "        await serving\n"
        "stop = Stop(lambda: asyncio.Event().wait(), lambda: 2, lambda each: print(each, flush=True))\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        process.terminate()
        assert process.stdout.readline().startswith("Draining(num_requests=2, seconds_left=")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
