"""The HTTP API over TLS: the same files, the same demands and the same renewal as gRPC's port."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from aiohttp import ClientConnectorError, ClientError, ClientSession, TCPConnector

from quire.rpc.tls import TlsFiles

PROMPT = {"prompt": "say it", "max_tokens": 50}


def client_context(authority: Any, shown: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context


async def status(url: str, context: ssl.SSLContext | None = None) -> int:
    """Return how a completion ends, asked for over a connection of its own."""
    async with (
        ClientSession(connector=TCPConnector(ssl=context or True)) as session,
        session.post(f"{url}/v1/completions", json=PROMPT) as response,
    ):
        return response.status


@pytest.fixture
async def files(authority: Any) -> TlsFiles:
    issued: TlsFiles = authority.issue("127.0.0.1")
    return issued


@pytest.fixture
async def url(pair: Any, files: TlsFiles) -> str:
    """Run a router that asks clients for certificates."""
    await pair.start(
        http_port=0, tls_cert=files.certificate, tls_key=files.key, tls_client_ca=files.authority
    )
    return f"https://{pair.running.http.address}"


async def test_clients_must_show_a_certificate(url: str, authority: Any, files: TlsFiles) -> None:
    assert await status(url, client_context(authority, authority.issue("client"))) == 200
    for refused in (
        client_context(authority),
        client_context(authority, authority.other().issue("stranger")),
        client_context(authority, authority.issue("late", days=-1)),
    ):
        with pytest.raises(ClientError):
            await status(url, refused)
    with pytest.raises(ClientError):
        await status(url.replace("https", "http"))


async def test_without_an_authority_clients_need_no_certificate(pair: Any, authority: Any) -> None:
    files = authority.issue("127.0.0.1")
    await pair.start(http_port=0, tls_cert=files.certificate, tls_key=files.key)
    url = f"https://{pair.running.http.address}"
    assert await status(url, client_context(authority)) == 200
    with pytest.raises(ClientConnectorError, match="certificate verify failed"):
        await status(url, client_context(authority.other()))


async def test_renewed_files_count_and_broken_ones_do_not(url: str, authority: Any, files: TlsFiles) -> None:
    old = client_context(authority, authority.issue("client"))
    files.certificate.write_bytes(b"no certificate")
    assert await status(url, old) == 200
    successor = authority.other()
    renewed = successor.issue("127.0.0.1")
    authority.file.write_bytes(successor.file.read_bytes())
    assert await status(url, client_context(successor, successor.issue("client"))) == 200
    assert renewed.certificate == files.certificate
    with pytest.raises(ClientError):
        await status(url, old)
