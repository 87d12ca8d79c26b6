"""Calls that send no request, half of one, or no message: each ends, and other calls are served."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import h2.config
import h2.connection
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc import server as module
from quire.rpc.request_intake import RequestIntake
from quire.rpc.server import GrpcServer, Service, grpc_server
from tests.testing.rpc_errors import error_of

NAME = "quire.v1.GenerationService"
IMPATIENT_SECONDS = 0.2


class Servicer(pb_grpc.GenerationServiceServicer):
    """Answers at once."""

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=[len(request.text)])

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        yield pb.GenerateStreamResponse(text=request.generation.text)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrpcServer]:
    monkeypatch.setattr(
        module, "RequestIntake", lambda **options: RequestIntake(IMPATIENT_SECONDS, **options)
    )
    services = [Service(pb_grpc.add_GenerationServiceServicer_to_server, Servicer(), NAME)]
    async with grpc_server(
        services, registry=CollectorRegistry(), grace_seconds=0, max_message_bytes=1 << 20
    ) as running:
        yield running


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address, options=options) as connected:
        yield connected


async def answers(channel: grpc.aio.Channel) -> bool:
    """Return whether the server still does what it is there for."""
    response = await pb_grpc.GenerationServiceStub(channel).Tokenize(
        pb.TokenizeRequest(text="four"), timeout=10
    )
    return list(response.token_ids) == [4]


@pytest.mark.parametrize("method", ["Tokenize", "GenerateStream"])
async def test_a_call_without_a_request_is_ended(channel: grpc.aio.Channel, method: str) -> None:
    call = channel.stream_unary(f"/{NAME}/{method}", None, None)(None)
    await error_of(call, grpc.StatusCode.DEADLINE_EXCEEDED, "did not arrive within 0.2 s")
    assert await answers(channel)


async def test_half_a_request_ends_the_call(server: GrpcServer, channel: grpc.aio.Channel) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    http.initiate_connection()
    headers = {":method": "POST", ":scheme": "http", ":path": f"/{NAME}/Tokenize", ":authority": "x"}
    http.send_headers(1, [*headers.items(), ("content-type", "application/grpc"), ("te", "trailers")])
    http.send_data(1, struct.pack(">BI", 0, 1000) + b"only this")
    writer.write(http.data_to_send())
    trailers: dict[bytes, bytes] = {}
    async with asyncio.timeout(10):
        while b"grpc-status" not in trailers:
            for event in http.receive_data(await reader.read(65536)):
                trailers.update(dict(getattr(event, "headers", None) or []))
            writer.write(http.data_to_send())
    assert trailers[b"grpc-status"] == b"4"  # DEADLINE_EXCEEDED
    writer.close()
    await writer.wait_closed()
    assert await answers(channel)


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.3)
    async with grpc_server([], registry=CollectorRegistry(), grace_seconds=0) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        async with asyncio.timeout(10):
            while await reader.read(1024):
                pass
        writer.close()


async def test_no_request_at_all_is_the_callers_fault(channel: grpc.aio.Channel) -> None:
    error = await error_of(channel.stream_unary(f"/{NAME}/Tokenize", None, None)(iter(())))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the call ended without one" in (error.details() or "")


@pytest.mark.parametrize("method", ["Tokenize", "GenerateStream"])
async def test_bytes_that_are_no_message_are_the_callers_fault(
    channel: grpc.aio.Channel, method: str
) -> None:
    call = channel.stream_unary(f"/{NAME}/{method}", None, None)(iter((b"\xff\xff\xff",)))
    await error_of(call, grpc.StatusCode.INVALID_ARGUMENT, "no message of this call")
    assert await answers(channel)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_message_that_is_too_large_is_refused_packed_or_not(
    channel: grpc.aio.Channel, compression: grpc.Compression
) -> None:
    request = pb.TokenizeRequest(text="x" * (64 << 20))
    error = await error_of(pb_grpc.GenerationServiceStub(channel).Tokenize(request, compression=compression))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await answers(channel)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rubbish=st.binary(max_size=300), greeting=st.booleans())
def test_rubbish_on_the_socket_does_not_stop_the_server(rubbish: bytes, greeting: bool) -> None:
    asyncio.run(_send_rubbish(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * greeting + rubbish))


async def _send_rubbish(rubbish: bytes) -> None:
    services = [Service(pb_grpc.add_GenerationServiceServicer_to_server, Servicer(), NAME)]
    async with grpc_server(services, registry=CollectorRegistry(), grace_seconds=0) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(rubbish)
        await writer.drain()
        async with grpc.aio.insecure_channel(running.address) as channel:
            assert await answers(channel)
        writer.close()
