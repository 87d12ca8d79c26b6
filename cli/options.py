"""Options of more than one verb. A value is that of the flag, else of the variable, else the default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from quire.cli.failure import usage_errors
from quire.settings.setting import variable

if TYPE_CHECKING:
    from quire.client import Tls
    from quire.client.router_client import RouterClient

DEFAULT_ADDRESS = "127.0.0.1:8500"
CONNECTION = "Connection"
C = TypeVar("C", bound="RouterClient")


def option(flag: str, help: str, panel: str, **more: Any) -> Any:
    """Return an option that has an environment variable."""
    return typer.Option(flag, help=help, rich_help_panel=panel, envvar=variable(flag), **more)


def _file(flag: str, help: str) -> Any:
    return option(flag, help, CONNECTION, exists=True, dir_okay=False)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _several(text: str) -> str:
    """Check addresses that are separated by commas."""
    addresses = text.split(",")
    if not all(addresses) or len(set(addresses)) < len(addresses):
        raise typer.BadParameter(f"must name routers once each, as a:8500,b:8500; got {text!r}")
    return text


def _key(text: str | None) -> str | None:
    """Check an API key."""
    from quire.client.tls import bearer

    with usage_errors():
        bearer(text)
    return text


ApiKey = Annotated[
    str | None,
    option(
        "--api-key",
        "API key; better given by the variable.",
        CONNECTION,
        show_default=False,
        callback=_key,
    ),
]


@dataclass(frozen=True)
class RouterConnection:
    """The options for a connection to a router; ``ClientTls`` has those that encrypt it."""

    address: Annotated[
        str,
        option(
            "--address",
            "host:port of the router's public gRPC port; several routers are separated by commas.",
            CONNECTION,
            callback=_several,
        ),
    ] = DEFAULT_ADDRESS
    api_key: ApiKey = None
    timeout: Annotated[
        float, option("--timeout", "Deadline of an answer, in seconds.", CONNECTION, min=0.001)
    ] = 300.0

    def client(self, kind: type[C], tls: Tls | None) -> C:
        """Return a client of the chosen kind."""
        return kind(self.address.split(","), timeout=self.timeout, api_key=self.api_key, tls=tls)


@dataclass(frozen=True)
class ClientTls:
    """The options for an encrypted connection to a router or a worker."""

    tls_ca: Annotated[
        Path | None, _file("--tls-ca", "Encrypt, and trust this authority of the server's certificate.")
    ] = None
    tls_name: Annotated[
        str | None,
        option("--tls-name", "Name in the server's certificate; by default the address's host.", CONNECTION),
    ] = None
    tls_client_cert: Annotated[
        Path | None, _file("--tls-client-cert", "PEM certificate to show, where the server asks for one.")
    ] = None
    tls_client_key: Annotated[Path | None, _file("--tls-client-key", "PEM key of that certificate.")] = None

    @classmethod
    def from_environment(cls) -> ClientTls:
        """Return the options as the environment variables set them."""
        ca, name, cert, key = (
            os.environ.get(variable(flag))
            for flag in ("--tls-ca", "--tls-name", "--tls-client-cert", "--tls-client-key")
        )
        return cls(_path(ca), name, _path(cert), _path(key))

    def files(self) -> Tls | None:
        """Return the files for a client; None without an authority, and then nothing is encrypted.

        Raises:
            BadParameter: the options are incomplete.
        """
        if self.tls_ca is None:
            if self.tls_name or self.tls_client_cert or self.tls_client_key:
                raise typer.BadParameter("--tls-name, --tls-client-cert and --tls-client-key need --tls-ca")
            return None
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise typer.BadParameter(
                "a client's certificate needs both --tls-client-cert and --tls-client-key"
            )
        from quire.client import Tls

        return Tls(
            ca=self.tls_ca, certificate=self.tls_client_cert, key=self.tls_client_key, name=self.tls_name
        )


ServedModel = Annotated[
    str | None, typer.Option("--model", help="Name of the served model.", rich_help_panel=CONNECTION)
]
Stats = Annotated[
    bool, typer.Option("--stats", help="Print timings and the origin of the KV blocks to stderr.")
]
