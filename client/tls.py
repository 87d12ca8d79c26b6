"""TLS and API keys: how a client authenticates itself, and the router to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The PEM files of an encrypted connection.

    Attributes:
        ca: authority that signed the router's certificate; by default the public authorities.
        certificate: the client's own certificate, if the router asks for one; it needs its ``key``.
        name: the name in the router's certificate, if it differs from the address.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together: give both")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials made from the files.

        Raises:
            OSError: a file cannot be read.
        """
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def options(self) -> list[tuple[str, str]]:
        """Return the channel options that the credentials need."""
        return [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that sends an API key with a call; empty without a key.

    Raises:
        ValueError: gRPC cannot send the key.
    """
    if api_key is None:
        return ()
    if not isinstance(api_key, str) or not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key must be printable ASCII without line breaks")
    return (("authorization", f"Bearer {api_key}"),)


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
