"""Certificates: who may connect, what is refused at the start, what is renewed while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from quire.services.errors import BadFileError
from quire.services.grpc_server import GrpcServer, grpc_server
from quire.services.tls import CLUSTER_NAME, ClusterTls, TlsFiles, server_credentials


class Authority:
    """Signs certificates and writes them to files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.file = folder / f"ca-{id(self)}.pem"
        self.ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *, days: int = 1) -> TlsFiles:
        """Write a certificate for a name; a negative number of days makes one that has expired."""
        until = datetime.now(UTC) + timedelta(days=days)
        issued = self.ca.issue_cert(name, not_before=until - timedelta(days=400), not_after=until)
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.file)
        files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        files.key.write_bytes(issued.private_key_pem.bytes())
        return files


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


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
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


def public_channel(server: GrpcServer, ca: Path, name: str = "quire.example") -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        server.address,
        grpc.ssl_channel_credentials(ca.read_bytes()),
        options=[("grpc.ssl_target_name_override", name)],
    )


async def test_a_public_port_with_a_certificate(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("quire.example")
    async with served(server_credentials(TlsFiles(files.certificate, files.key))) as server:
        await check(public_channel(server, authority.file))
        await refused(grpc.aio.insecure_channel(server.address))
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(public_channel(server, Authority(tmp_path).file))
        await refused(public_channel(server, authority.file, "other.example"))


async def test_within_a_cluster_both_ends_show_a_certificate(authority: Authority, tmp_path: Path) -> None:
    cluster = ClusterTls(authority.issue(CLUSTER_NAME))
    stranger = Authority(tmp_path).issue("stranger")
    async with served(cluster.server_credentials()) as server:
        await check(cluster.connect(server.address))
        await refused(public_channel(server, authority.file, CLUSTER_NAME))
        # Signed by another authority, though it trusts ours.
        await refused(
            ClusterTls(TlsFiles(stranger.certificate, stranger.key, authority.file)).connect(server.address)
        )


async def test_a_peer_must_be_of_the_cluster_not_only_of_its_authority(authority: Authority) -> None:
    other, cluster = authority.issue("other.example"), ClusterTls(authority.issue(CLUSTER_NAME))
    async with served(server_credentials(other)) as server:
        await refused(cluster.connect(server.address))


async def test_an_expired_certificate_is_refused_by_name(authority: Authority) -> None:
    expired = authority.issue(CLUSTER_NAME, days=-1)
    with pytest.raises(BadFileError, match=rf"{CLUSTER_NAME}.pem expired at .*: renew it"):
        server_credentials(expired)
    with pytest.raises(BadFileError, match="expired"):
        ClusterTls(expired).connect("127.0.0.1:1")


async def test_a_client_with_an_expired_certificate_is_refused(authority: Authority) -> None:
    async with served(server_credentials(authority.issue(CLUSTER_NAME))) as server:
        expired = authority.issue("client", days=-1)
        credentials = grpc.ssl_channel_credentials(
            authority.file.read_bytes(), expired.key.read_bytes(), expired.certificate.read_bytes()
        )
        options = [("grpc.ssl_target_name_override", CLUSTER_NAME)]
        await refused(grpc.aio.secure_channel(server.address, credentials, options=options))


async def test_a_renewed_certificate_counts_and_a_broken_one_does_not(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("quire.example")
    async with served(server_credentials(TlsFiles(files.certificate, files.key))) as server:
        await check(public_channel(server, authority.file))
        files.certificate.write_bytes(b"no certificate")
        await check(public_channel(server, authority.file))
        authority.issue("quire.example", days=-1)
        await check(public_channel(server, authority.file))
        successor = Authority(tmp_path)
        successor.issue("quire.example")
        await check(public_channel(server, successor.file))
        await refused(public_channel(server, authority.file))


@pytest.mark.parametrize(
    ("content", "problem"), [(b"nonsense", "no PEM certificate"), (None, "cannot be read")]
)
def test_a_bad_file_is_named(authority: Authority, content: bytes | None, problem: str) -> None:
    files = authority.issue("quire.example")
    if content is None:
        files.certificate.unlink()
    else:
        files.certificate.write_bytes(content)
    with pytest.raises(BadFileError, match=rf"quire\.example\.pem.*{problem}"):
        server_credentials(files)


def test_a_key_that_is_not_the_certificates_is_refused(authority: Authority) -> None:
    files, other = authority.issue("quire.example"), authority.issue("other.example")
    with pytest.raises(BadFileError, match=r"other\.example\.key is not the key of"):
        server_credentials(TlsFiles(files.certificate, other.key))
