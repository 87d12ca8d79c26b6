"""Declares the settings that routers and workers have in common; importing this loads no gRPC."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quire.settings.setting import MAX_PORT, Panel, check_settings, flag_of, setting

if TYPE_CHECKING:
    from quire.rpc.tls import TlsFiles

LogLevel = Literal["debug", "info", "warning", "error"]


def _redis_problem(url: str) -> str | None:
    """Return a problem that does not repeat the URL, which may contain a password."""
    if url.startswith(("redis://", "rediss://", "redis+cluster://", "rediss+cluster://", "unix://")):
        return None
    return "must be a URL of Redis, which begins with redis://, rediss://, redis+cluster:// or unix://"


def _host_problem(host: str) -> str | None:
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    return f"must have brackets around an IPv6 address, as [::1]; got {host!r}" if is_bare else None


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Settings of a service, a router or a worker.

    Attributes:
        otlp_endpoint: collector of traces by OTLP/gRPC, by default that of OpenTelemetry's own variable.

    Raises:
        ValueError: settings are out of range or contradict each other.
    """

    host: str = setting("127.0.0.1", "--host", "Address to listen on.", Panel.COMMON, problem=_host_problem)
    redis_url: str | None = setting(
        None,
        "--redis-url",
        "Redis of the prefix index and of membership.",
        Panel.COMMON,
        problem=_redis_problem,
        is_secret=True,
    )
    cluster_secret: bytes = setting(
        b"",
        "--cluster-secret",
        "Keys the block hashes and proves who belongs to the cluster; the same for router and workers. "
        "Better given by the variable.",
        Panel.COMMON,
        is_secret=True,
    )
    metrics_port: int = setting(
        0,
        "--metrics-port",
        "Port of the Prometheus metrics; 0 takes a free one.",
        Panel.NETWORK,
        minimum=0,
        maximum=MAX_PORT,
    )
    served_model_name: str | None = setting(
        None, "--served-model-name", "Name that clients use; by default the model's.", Panel.MODEL
    )
    cluster_cert: Path | None = setting(
        None,
        "--cluster-cert",
        "PEM certificate for connections of router and workers; names quire-cluster.",
        Panel.SECURITY,
    )
    cluster_key: Path | None = setting(None, "--cluster-key", "PEM key of that certificate.", Panel.SECURITY)
    cluster_ca: Path | None = setting(
        None, "--cluster-ca", "Authority of the cluster's certificates, and of nothing else.", Panel.SECURITY
    )
    otlp_endpoint: str | None = field(
        default_factory=lambda: os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None
    )
    grace_seconds: float = setting(
        # Less than the 30 s after which Kubernetes kills a process.
        25.0,
        "--grace-period",
        "Seconds for which running requests may continue after SIGTERM or Ctrl-C.",
        Panel.PROCESS,
        minimum=0,
    )
    log_level: LogLevel = setting("info", "--log-level", "Least severe level that is logged.", Panel.PROCESS)

    def __post_init__(self) -> None:
        check_settings(self)
        files = (self.cluster_cert, self.cluster_key, self.cluster_ca)
        if any(files) and not all(files):
            raise ValueError("TLS within the cluster needs --cluster-cert, --cluster-key and --cluster-ca")

    def name_of(self, field: str) -> str:
        """Return what error messages call a field: its flag."""
        return flag_of(type(self), field)

    def check_distinct(self, ports: Mapping[str, int]) -> None:
        """Raise ValueError if two of the ports with these names are equal; 0 is a free one for each."""
        names: dict[int, str] = {}
        for name, port in ports.items():
            if port and names.setdefault(port, name) != name:
                raise ValueError(f"{names[port]} and {name} are both {port}: give each another port, or 0")

    @property
    def cluster_tls(self) -> TlsFiles | None:
        """Certificate files of connections between routers and workers; None: these are plain."""
        from quire.rpc.tls import TlsFiles

        if self.cluster_cert is None or self.cluster_key is None:
            return None
        return TlsFiles(self.cluster_cert, self.cluster_key, self.cluster_ca)
