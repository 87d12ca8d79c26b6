"""Loads and checks TLS certificates, and reloads them after a renewal."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from quire.rpc.errors import BadFileError
from quire.rpc.renewal import Renewal

if TYPE_CHECKING:
    from cryptography import x509

CLUSTER_NAME = "quire-cluster"
"""DNS name in every certificate of a cluster; clients check this name instead of the address."""

Connect = Callable[..., grpc.aio.Channel]
"""A function that opens a channel; it takes the arguments of ``grpc.aio.insecure_channel``."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection.

    Attributes:
        certificate: this end's certificate, followed by the intermediate certificates up to its authority.
        key: private key of the certificate.
        authority: certificates of the authority that must have signed the other end's certificate. A server
            without an authority does not ask clients for certificates.
    """

    certificate: Path
    key: Path
    authority: Path | None = None

    def follow(self, read: Callable[[TlsFiles], T]) -> Renewal[T]:
        """Return what reads the files again when they have changed."""
        paths = [path for path in (self.certificate, self.key, self.authority) if path]
        return Renewal(paths, lambda: read(self), "certificate")


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that reload changed files: the next connection uses a renewed certificate.

    Raises:
        BadFileError: a file is missing or malformed, or the certificate is out of date.
    """
    renewal = files.follow(_server_configuration)
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        renewal.first,
        renewal,  # type: ignore[arg-type]  # it may return None, which means no change
        require_client_authentication=files.authority is not None,
    )
    return credentials


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that also reloads changed files, for a server that does not use gRPC.

    Raises:
        BadFileError: see ``server_credentials``.
    """
    renewal = files.follow(_server_context)
    first = current = renewal.first

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal current
        current = renewal() or current
        connection.context = current

    # The callback runs in each handshake, with or without a server name, and may replace the context there.
    first.sni_callback = renew
    return first


def cluster_connect(files: TlsFiles | None) -> Connect:
    """Return the function that opens channels within the cluster: plain ones, or with files by mutual TLS.

    Each side shows a certificate of the cluster's authority. The files are read again for each channel; the
    function raises BadFileError if one is missing or malformed, or the certificate is out of date.
    """
    if files is None:
        return grpc.aio.insecure_channel

    def connect(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        certificate, key, authority = _read(files)
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        name = ("grpc.ssl_target_name_override", CLUSTER_NAME)
        return grpc.aio.secure_channel(address, credentials, options=[*options, name])

    return connect


def _server_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    certificate, key, authority = _read(files)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    _read(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A resumed session would stay valid after the authority that admitted its client was removed.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    try:
        context.load_cert_chain(files.certificate, files.key)
        if files.authority is not None:
            context.load_verify_locations(files.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise BadFileError(f"{files.certificate} cannot be served: {error}") from error
    return context


def _read(files: TlsFiles) -> tuple[bytes, bytes, bytes | None]:
    """Read and check certificate, key and authority; gRPC itself would report only a failed handshake."""
    # It is imported here because processes without TLS start 0.3 s faster without it.
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate, key = _read_file(files.certificate), _read_file(files.key)
    first, *_ = _parse_certificates(files.certificate, certificate)
    try:
        private_key = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadFileError(f"{files.key} holds no PEM key without a password: {error}") from error
    if private_key.public_key() != first.public_key():
        raise BadFileError(f"{files.key} is not the key of {files.certificate}")
    if files.authority is None:
        return certificate, key, None
    authority = _read_file(files.authority)
    _parse_certificates(files.authority, authority)
    return certificate, key, authority


def _parse_certificates(path: Path, content: bytes) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        certificates = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise BadFileError(f"{path} holds no PEM certificate: {error}") from error
    now = datetime.now(UTC)
    for each in certificates:
        if now > each.not_valid_after_utc:
            raise BadFileError(f"the certificate {path} expired at {each.not_valid_after_utc}: renew it")
        if now < each.not_valid_before_utc:
            raise BadFileError(f"the certificate {path} is valid from {each.not_valid_before_utc} on")
    return certificates


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFileError(f"{path} cannot be read: {error}") from error
