"""How a client proves who it is, and asks the router to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """An encrypted connection, from PEM files.

    Attributes:
        ca: authority of the router's certificate; by default the public ones.
        certificate: the client's own, where the router asks for one, with its ``key``.
        name: in the router's certificate, where the address has another.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together: give both")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            OSError: one cannot be read.
        """
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def options(self) -> list[tuple[str, str]]:
        """Return the options of a channel that go with the credentials."""
        return [] if self.name is None else [("grpc.ssl_target_name_override", self.name)]


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries a key with every call."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
