"""Options of the verbs that serve: who may call, and certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.options import setting

if TYPE_CHECKING:
    from quire.services.tls import TlsFiles

SECURITY = "Security"


def _file(flag: str, help: str) -> Any:
    return setting(flag, help, SECURITY, exists=True, dir_okay=False)


ApiKeysFile = Annotated[
    Path | None,
    _file("--api-keys", "File of API keys, see `quire keys`; without it nobody is asked for one."),
]
TlsCert = Annotated[Path | None, _file("--tls-cert", "PEM certificate of the public ports, with its chain.")]
TlsKey = Annotated[Path | None, _file("--tls-key", "PEM key of that certificate.")]
TlsClientCa = Annotated[
    Path | None, _file("--tls-client-ca", "Clients must show a certificate of this authority.")
]
ClusterCert = Annotated[
    Path | None,
    _file("--cluster-cert", "PEM certificate for connections of router and workers; names quire-cluster."),
]
ClusterKey = Annotated[Path | None, _file("--cluster-key", "PEM key of that certificate.")]
ClusterCa = Annotated[
    Path | None, _file("--cluster-ca", "Authority of the cluster's certificates, and of nothing else.")
]


def public_tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """Return the files of the public ports.

    Raises:
        ValueError: they are not complete.
    """
    from quire.services.tls import TlsFiles

    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise ValueError("TLS needs both --tls-cert and --tls-key")
    return TlsFiles(certificate, key, client_ca)


def cluster_tls(certificate: Path | None, key: Path | None, authority: Path | None) -> TlsFiles | None:
    """Return the files of the connections within the cluster.

    Raises:
        ValueError: they are not complete.
    """
    from quire.services.tls import TlsFiles

    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise ValueError("TLS within the cluster needs --cluster-cert, --cluster-key and --cluster-ca")
    return TlsFiles(certificate, key, authority)
