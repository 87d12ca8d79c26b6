"""Certificates: who may connect, what is refused at the start, what is renewed while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from quire.rpc.errors import BadFileError
from quire.rpc.server import GrpcServer, grpc_server
from quire.rpc.tls import CLUSTER_NAME, TlsFiles, cluster_connect, server_context, server_credentials
from tests.testing.rpc_errors import error_of


@asynccontextmanager
async def served(credentials: grpc.ServerCredentials) -> AsyncIterator[GrpcServer]:
    async with grpc_server(
        [], registry=CollectorRegistry(), credentials=credentials, grace_seconds=0
    ) as server:
        await server.ready()
        yield server


async def check(channel: grpc.aio.Channel) -> Any:
    async with channel:
        return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)


async def refused(channel: grpc.aio.Channel) -> str:
    """Return why a connection does not come about."""
    caught = await error_of(check(channel), grpc.StatusCode.UNAVAILABLE)
    return caught.details() or ""


def public_channel(server: GrpcServer, ca: Path, name: str = "quire.example") -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        server.address,
        grpc.ssl_channel_credentials(ca.read_bytes()),
        options=[("grpc.ssl_target_name_override", name)],
    )


async def test_a_public_port_with_a_certificate(authority: Any) -> None:
    files = authority.issue("quire.example")
    async with served(server_credentials(TlsFiles(files.certificate, files.key))) as server:
        await check(public_channel(server, authority.file))
        await refused(grpc.aio.insecure_channel(server.address))
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(public_channel(server, authority.other().file))
        await refused(public_channel(server, authority.file, "other.example"))


async def test_within_a_cluster_both_ends_show_a_certificate(authority: Any) -> None:
    cluster = authority.issue(CLUSTER_NAME)
    connect = cluster_connect(cluster)
    stranger = authority.other().issue("stranger")
    async with served(server_credentials(cluster)) as server:
        await check(connect(server.address))
        await refused(public_channel(server, authority.file, CLUSTER_NAME))
        # Signed by another authority, though it trusts ours.
        await refused(
            cluster_connect(TlsFiles(stranger.certificate, stranger.key, authority.file))(server.address)
        )


async def test_a_peer_must_be_of_the_cluster_not_only_of_its_authority(authority: Any) -> None:
    other, cluster = authority.issue("other.example"), authority.issue(CLUSTER_NAME)
    async with served(server_credentials(other)) as server:
        await refused(cluster_connect(cluster)(server.address))


async def test_an_expired_certificate_is_refused_by_name(authority: Any) -> None:
    expired = authority.issue(CLUSTER_NAME, days=-1)
    with pytest.raises(BadFileError, match=rf"{CLUSTER_NAME}.pem expired at .*: renew it"):
        server_credentials(expired)
    with pytest.raises(BadFileError, match="expired"):
        cluster_connect(expired)("127.0.0.1:1")


async def test_a_client_with_an_expired_certificate_is_refused(authority: Any) -> None:
    async with served(server_credentials(authority.issue(CLUSTER_NAME))) as server:
        expired = authority.issue("client", days=-1)
        credentials = grpc.ssl_channel_credentials(
            authority.file.read_bytes(), expired.key.read_bytes(), expired.certificate.read_bytes()
        )
        options = [("grpc.ssl_target_name_override", CLUSTER_NAME)]
        await refused(grpc.aio.secure_channel(server.address, credentials, options=options))


async def test_a_renewed_certificate_counts_and_a_broken_one_does_not(authority: Any) -> None:
    files = authority.issue("quire.example")
    async with served(server_credentials(TlsFiles(files.certificate, files.key))) as server:
        await check(public_channel(server, authority.file))
        files.certificate.write_bytes(b"no certificate")
        await check(public_channel(server, authority.file))
        authority.issue("quire.example", days=-1)
        await check(public_channel(server, authority.file))
        successor = authority.other()
        successor.issue("quire.example")
        await check(public_channel(server, successor.file))
        await refused(public_channel(server, authority.file))


@pytest.mark.parametrize("configure", [server_credentials, server_context])
@pytest.mark.parametrize(
    ("content", "problem"), [(b"nonsense", "no PEM certificate"), (None, "cannot be read")]
)
def test_a_bad_file_is_named(
    authority: Any, content: bytes | None, problem: str, configure: Callable[[TlsFiles], object]
) -> None:
    files = authority.issue("quire.example")
    if content is None:
        files.certificate.unlink()
    else:
        files.certificate.write_bytes(content)
    with pytest.raises(BadFileError, match=rf"quire\.example\.pem.*{problem}"):
        configure(files)


def test_a_key_that_is_not_the_certificates_is_refused(authority: Any) -> None:
    files, other = authority.issue("quire.example"), authority.issue("other.example")
    with pytest.raises(BadFileError, match=r"other\.example\.key is not the key of"):
        server_credentials(TlsFiles(files.certificate, other.key))
