"""Holds a router's settings; importing this loads no gRPC."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire.kvindex.worker_record import POLL_SECONDS
from quire.routing.placement import PolicyConfig
from quire.sampling.model_defaults import GenerationConfig
from quire.services.server.config import ServiceConfig
from quire.settings.setting import MAX_PORT, Panel, check_settings, is_address, setting

if TYPE_CHECKING:
    from quire.rpc.tls import TlsFiles

DEFAULT_HTTP_PORT = 8502
"""Port of the HTTP API under ``quire serve``."""
DEFAULT_ADMIN_PORT = 8503
"""Port at which ``quire admin`` looks for a router."""
PORT_STEP = 100
"""Distance between the metrics ports, and the admin ports, of router processes with the same public ports."""
SILENT_SECONDS = 7.0
"""A worker that answers no probe for this long is lost, and its calls end."""


def _addresses_problem(addresses: Sequence[str]) -> str | None:
    for address in addresses:
        if not is_address(address):
            return f"must name host:port, as 127.0.0.1:9000; {address!r} is not host:port"
        if addresses.count(address) > 1:
            return f"names {address} more than once: give each worker once"
    return None


def _target_problem(milliseconds: float) -> str | None:
    return None if 0 < milliseconds < math.inf else f"must be above 0; got {milliseconds:g}"


@dataclass(frozen=True, kw_only=True)
class SloTargets:
    """Maximum time to the first token, and maximum mean time for each further token, in milliseconds."""

    ttft_ms: float = setting(
        1000,
        "--slo-ttft-ms",
        "Target for the first token, for the goodput metrics.",
        Panel.OBSERVABILITY,
        problem=_target_problem,
    )
    tpot_ms: float = setting(
        100,
        "--slo-tpot-ms",
        "Target for each further token, for the goodput metrics.",
        Panel.OBSERVABILITY,
        problem=_target_problem,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def ttft_seconds(self) -> float:
        """Maximum time to the first token, in seconds."""
        return self.ttft_ms / 1000

    @property
    def tpot_seconds(self) -> float:
        """Maximum mean time for each further token, in seconds."""
        return self.tpot_ms / 1000


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """Time limits for a client, in seconds.

    Attributes:
        head_seconds: time from the start of a connection, or from the last response, until the headers of the
            next request have arrived.
        body_seconds: time from the headers of a request until its body has arrived.
        piece_seconds: time within which each further KiB of a body must arrive.
        read_seconds: time within which a client has to read some of the bytes that wait for it.
    """

    head_seconds: float = 20.0
    body_seconds: float = 30.0
    piece_seconds: float = 10.0
    read_seconds: float = 30.0


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServiceConfig):
    """Settings of a router; workers come from ``redis_url``, or from ``worker_addresses`` if that is None.

    Attributes:
        launcher_address: host:port of the process that has started this router and can scale workers.
        http_times: time limits of HTTP clients.
        poll_seconds: interval at which the router looks for workers and probes the busy ones.
        silent_seconds: time after which a worker that answers no probe is lost.

    Raises:
        ValueError: settings are out of range or contradict each other.
    """

    port: int = setting(
        8500, "--port", "Public gRPC port; 0 takes a free one.", Panel.COMMON, minimum=0, maximum=MAX_PORT
    )
    http_port: int | None = setting(
        None,
        "--http-port",
        "Port of the OpenAI-compatible API; 0 takes a free one.",
        Panel.COMMON,
        minimum=0,
        maximum=MAX_PORT,
    )
    num_processes: int = setting(
        1,
        "--router-processes",
        "Router processes on the same public ports, for more than one processor.",
        Panel.PROCESS,
        minimum=1,
        maximum=64,
    )
    worker_addresses: tuple[str, ...] = setting(
        (),
        "--worker",
        "host:port of a worker, instead of finding it in Redis; may be repeated.",
        Panel.NETWORK,
        problem=_addresses_problem,
    )
    admin_port: int | None = setting(
        None,
        "--admin-port",
        "Port on the loopback for `quire admin`; 0 takes a free one.",
        Panel.NETWORK,
        minimum=0,
        maximum=MAX_PORT,
        shown_default=f"{DEFAULT_ADMIN_PORT}, or a free one where --port is 0",
    )
    model: str | None = setting(
        None, "--model", "Folder or hub id of tokenizer and template; by default the workers'.", Panel.MODEL
    )
    generation_config: GenerationConfig = setting(
        "auto",
        "--generation-config",
        "Whether requests get the sampling defaults of the model's generation_config.json.",
        Panel.MODEL,
    )
    max_requests: int = setting(
        1024,
        "--max-requests",
        "Most running answers; a request with n answers counts n times; more are refused.",
        Panel.LIMITS,
        minimum=1,
    )
    max_request_bytes: int = setting(
        256 << 20,
        "--max-request-bytes",
        "Most bytes of the running requests, such as 256MiB; more are refused.",
        Panel.LIMITS,
        minimum=32 << 20,
        is_size=True,
    )
    request_timeout_seconds: float = setting(
        600.0,
        "--request-timeout",
        "Longest deadline of a request, in seconds.",
        Panel.LIMITS,
        minimum=0.001,
    )
    worker_wait_seconds: float = setting(
        30.0,
        "--worker-wait",
        "Seconds that a request waits while no worker can serve it; 0 refuses it immediately.",
        Panel.LIMITS,
        minimum=0,
    )
    copy_answers: bool = setting(
        False,
        "--copy-answers",
        "Another worker copies the blocks of running answers, so that a failure costs little.",
        Panel.CACHE,
    )
    api_keys_file: Path | None = setting(
        None,
        "--api-keys",
        "File of API keys, see `quire keys`; without it no key is required.",
        Panel.COMMON,
    )
    tls_cert: Path | None = setting(
        None, "--tls-cert", "PEM certificate of the public ports, with its chain.", Panel.SECURITY
    )
    tls_key: Path | None = setting(None, "--tls-key", "PEM key of that certificate.", Panel.SECURITY)
    tls_client_ca: Path | None = setting(
        None, "--tls-client-ca", "Clients must show a certificate of this authority.", Panel.SECURITY
    )
    elastic_roles: bool = setting(
        False,
        "--elastic-roles",
        "Change workers' roles with the load, so that requests meet --slo-ttft-ms and --slo-tpot-ms.",
        Panel.ROUTING,
    )
    placing: PolicyConfig = field(default_factory=PolicyConfig)
    slo: SloTargets = field(default_factory=SloTargets)
    launcher_address: str | None = None
    http_times: HttpTimes = field(default_factory=HttpTimes)
    poll_seconds: float = POLL_SECONDS
    silent_seconds: float = SILENT_SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_tls = self.tls_cert or self.tls_key or self.tls_client_ca
        if needs_tls and not (self.tls_cert and self.tls_key):
            raise ValueError("TLS needs both --tls-cert and --tls-key")
        last_port = max(self.metrics_port, self.chosen_admin_port) + PORT_STEP * (self.num_processes - 1)
        if last_port > MAX_PORT:
            raise ValueError(f"--router-processes {self.num_processes} needs ports up to {last_port}")
        self.check_distinct(self.ports)

    @property
    def ports(self) -> Mapping[str, int]:
        """The ports of all processes, by their names in messages; 0: a free one."""
        ports = {"--port": self.port, "--http-port": self.http_port or 0}
        for name, port in (("--metrics-port", self.metrics_port), ("--admin-port", self.chosen_admin_port)):
            ports[name] = port
            for step in range(PORT_STEP, PORT_STEP * self.num_processes, PORT_STEP):
                ports[f"{name} + {step}"] = port and port + step
        return ports

    @property
    def public_tls(self) -> TlsFiles | None:
        """Certificate files of the public ports; None: plain connections."""
        from quire.rpc.tls import TlsFiles

        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def chosen_admin_port(self) -> int:
        """Port for ``quire admin``; 0: a free one."""
        if self.admin_port is None:
            return DEFAULT_ADMIN_PORT if self.port else 0
        return self.admin_port
