"""Security options of the verbs that serve: API keys and certificates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.options import setting

if TYPE_CHECKING:
    from quire.services.server.tls import TlsFiles

SECURITY = "Security"


def _file(flag: str, help: str) -> Any:
    return setting(flag, help, SECURITY, exists=True, dir_okay=False)


@dataclass(frozen=True)
class PublicSecurity:
    """API keys and certificate of the public port."""

    api_keys: Annotated[
        Path | None,
        _file("--api-keys", "File of API keys, see `quire keys`; without it nobody is asked for one."),
    ] = None
    tls_cert: Annotated[
        Path | None, _file("--tls-cert", "PEM certificate of the public ports, with its chain.")
    ] = None
    tls_key: Annotated[Path | None, _file("--tls-key", "PEM key of that certificate.")] = None
    tls_client_ca: Annotated[
        Path | None, _file("--tls-client-ca", "Clients must show a certificate of this authority.")
    ] = None

    def tls(self) -> TlsFiles | None:
        """Return the TLS files of the public ports; None if there are none.

        Raises:
            ValueError: the files are incomplete.
        """
        from quire.services.server.tls import TlsFiles

        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise ValueError("TLS needs both --tls-cert and --tls-key")
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)


@dataclass(frozen=True)
class ClusterSecurity:
    """Certificates of the connections between router and workers."""

    cluster_cert: Annotated[
        Path | None,
        _file(
            "--cluster-cert", "PEM certificate for connections of router and workers; names quire-cluster."
        ),
    ] = None
    cluster_key: Annotated[Path | None, _file("--cluster-key", "PEM key of that certificate.")] = None
    cluster_ca: Annotated[
        Path | None, _file("--cluster-ca", "Authority of the cluster's certificates, and of nothing else.")
    ] = None

    def tls(self) -> TlsFiles | None:
        """Return the TLS files of the connections within the cluster; None if there are none.

        Raises:
            ValueError: the files are incomplete.
        """
        from quire.services.server.tls import TlsFiles

        if self.cluster_cert is None and self.cluster_key is None and self.cluster_ca is None:
            return None
        if self.cluster_cert is None or self.cluster_key is None or self.cluster_ca is None:
            raise ValueError("TLS within the cluster needs --cluster-cert, --cluster-key and --cluster-ca")
        return TlsFiles(self.cluster_cert, self.cluster_key, self.cluster_ca)
