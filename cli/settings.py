"""The settings of the verbs that serve, with their names, types and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quire.cli.failure import is_address
from quire.cli.options import setting
from quire.cli.sizes import parse_folder_and_size, parse_size

if TYPE_CHECKING:
    from quire.routing.planner import PolicyConfig
    from quire.services.router.slo import SloTargets
    from quire.services.worker.config import WorkerConfig

NETWORK, MODEL, CACHE, LIMITS, PROCESS = "Network", "Model", "KV cache", "Batch limits", "Process"
ROUTING = "Routing"
OBSERVABILITY = "Observability"

MAX_PORT = 65535
DEFAULT_ADMIN_PORT = 8503
"""Where `quire admin` looks for a router."""


def check_redis_url(url: str | None) -> str | None:
    """Return the URL if it is a URL of Redis.

    Raises:
        BadParameter: it is not. The message does not repeat the URL, which may contain a password.
    """
    if url is not None and not url.startswith(("redis://", "rediss://", "unix://")):
        raise typer.BadParameter("a URL of Redis begins with redis://, rediss:// or unix://")
    return url


def check_addresses(addresses: list[str] | None) -> list[str] | None:
    """Return the addresses of workers if all of them are valid.

    Raises:
        BadParameter: an address is not host:port.
    """
    for address in addresses or ():
        if not is_address(address):
            raise typer.BadParameter(f"{address!r} is not host:port, as 127.0.0.1:9000")
    return addresses


Host = Annotated[str, setting("--host", "Address to listen on.", NETWORK)]
PublicPort = Annotated[
    int, setting("--port", "Public gRPC port; 0 takes a free one.", NETWORK, min=0, max=MAX_PORT)
]
RedisUrl = Annotated[
    str | None,
    setting("--redis-url", "Redis of the prefix index and of membership.", NETWORK, callback=check_redis_url),
]
MetricsPort = Annotated[
    int,
    setting(
        "--metrics-port", "Port of the Prometheus metrics; 0 takes a free one.", NETWORK, min=0, max=MAX_PORT
    ),
]
AdminPort = Annotated[
    int, setting("--admin-port", "Port for `quire admin`; 0 takes a free one.", NETWORK, min=0, max=MAX_PORT)
]
ClusterSecret = Annotated[
    str,
    setting(
        "--cluster-secret",
        "Keys the block hashes and proves who belongs to the cluster; the same for router and workers. "
        "Better given by the variable.",
        NETWORK,
        show_default=False,
    ),
]
ServedModelName = Annotated[
    str | None, setting("--served-model-name", "Name that clients use; by default the model's.", MODEL)
]
WriteBack = Annotated[
    bool,
    setting(
        "--write-back", "Prefill workers copy the blocks of answers in idle time, for the next turn.", CACHE
    ),
]
GracePeriod = Annotated[
    float,
    setting(
        "--grace-period", "How long requests may go on after SIGTERM or Ctrl-C, in seconds.", PROCESS, min=0
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    setting(
        "--otlp-endpoint",
        "Send traces there by OTLP/gRPC, as http://host:4317; needs the extra 'tracing'.",
        OBSERVABILITY,
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    setting("--log-level", "Least severity of logged events.", PROCESS),
]

GRACE_SECONDS = 25.0
"""Default time to finish requests at the end; less than the 30 s after which Kubernetes kills a process."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine, which all workers have."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id of the model; by default the bundled demo.",
            envvar="QUIRE_MODEL",
            metavar="MODEL",
        ),
    ] = None
    served_model_name: ServedModelName = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        setting("--dtype", "Type of weights and KV cache.", MODEL),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        setting("--kv-cache-dtype", "Type of the KV cache: the model's, or 8 bits, less exact.", CACHE),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        setting("--max-model-len", "Most tokens of prompt and answer; by default the model's.", MODEL, min=1),
    ] = None
    block_size: Annotated[int, setting("--block-size", "Tokens in a KV block.", CACHE, min=1)] = 16
    kv_memory: Annotated[
        int | None,
        setting(
            "--kv-memory",
            "Memory for KV blocks, as 512MiB or 2GiB.",
            CACHE,
            parser=parse_size,
            metavar="SIZE",
        ),
    ] = None
    num_blocks: Annotated[
        int | None, setting("--num-blocks", "KV blocks of a worker; instead of --kv-memory.", CACHE, min=1)
    ] = None
    swap_memory: Annotated[
        int,
        setting(
            "--swap-memory",
            "Host memory for the blocks of preempted requests, as 64MiB; 0 for none.",
            CACHE,
            parser=parse_size,
            metavar="SIZE",
        ),
    ] = "64MiB"  # type: ignore[assignment]  # typer parses it
    host_cache: Annotated[
        int,
        setting(
            "--host-cache",
            "Host memory for cached blocks that the pool evicts, as 1GiB; 0 for none.",
            CACHE,
            parser=parse_size,
            metavar="SIZE",
        ),
    ] = "0"  # type: ignore[assignment]
    disk_cache: Annotated[
        tuple[str, int] | None,
        setting(
            "--disk-cache",
            "Folder and size for cached blocks that the host cache evicts, as /var/cache/quire:20GiB.",
            CACHE,
            parser=parse_folder_and_size,
            metavar="FOLDER:SIZE",
        ),
    ] = None
    index_stride: Annotated[
        int,
        setting("--index-stride", "Publish every k-th block: a k-th of the index's memory.", CACHE, min=1),
    ] = 1
    preemption: Annotated[
        Literal["auto", "swap", "recompute"],
        setting(
            "--preemption", "Bring preempted requests back from host memory or compute them again.", CACHE
        ),
    ] = "auto"
    max_num_seqs: Annotated[int, setting("--max-num-seqs", "Most sequences in a step.", LIMITS, min=1)] = 64
    max_num_batched_tokens: Annotated[
        int, setting("--max-num-batched-tokens", "Most tokens in a step.", LIMITS, min=1)
    ] = 512
    max_step_seconds: Annotated[
        float,
        setting(
            "--max-step-seconds",
            "A worker whose engine hangs in one step for this long ends; see docs/operations.md.",
            PROCESS,
            min=1.0,
        ),
    ] = 60.0
    threads: Annotated[
        int | None,
        setting("--threads", "CPU threads of a worker; by default its share of the cores.", PROCESS, min=1),
    ] = None
    vllm_grpc: Annotated[
        bool,
        setting(
            "--vllm-grpc",
            "Workers serve vllm.grpc.engine.VllmEngine too, for gateways of vLLM (extra vllm-grpc).",
            NETWORK,
        ),
    ] = False

    def config(self, role: Literal["prefill", "decode"]) -> WorkerConfig:
        """Return a worker's configuration with the engine's settings.

        Raises:
            ValueError: settings contradict each other.
        """
        from quire.services.worker.config import DiskFolder, WorkerConfig

        return WorkerConfig(
            role=role,
            model=self.model,
            served_model_name=self.served_model_name,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_memory_bytes=self.kv_memory,
            num_blocks=self.num_blocks,
            swap_memory_bytes=self.swap_memory,
            host_cache_bytes=self.host_cache,
            disk_cache=DiskFolder(*self.disk_cache) if self.disk_cache else None,
            index_stride=self.index_stride,
            preemption=self.preemption,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_step_seconds=self.max_step_seconds,
            threads=self.threads,
            vllm_grpc=self.vllm_grpc,
        )


@dataclass(frozen=True)
class SpeculationSettings:
    """Settings of speculation, for decode workers only; a prefill worker samples one token of a request."""

    speculation: Annotated[
        Literal["off", "ngram", "draft"],
        setting(
            "--speculation",
            "How decode workers guess tokens that a step then verifies: by earlier text or a draft model.",
            MODEL,
        ),
    ] = "off"
    num_speculative_tokens: Annotated[
        int,
        setting("--num-speculative-tokens", "Most guesses for one sequence in a step.", MODEL, min=1, max=7),
    ] = 4
    draft_model: Annotated[
        str | None, setting("--draft-model", "Folder or hub id of the model of --speculation draft.", MODEL)
    ] = None


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker that runs as a separate process, not under ``quire serve``."""

    host: Host = "127.0.0.1"
    port: Annotated[
        int, setting("--port", "gRPC port; 0 takes a free one.", NETWORK, min=0, max=MAX_PORT)
    ] = 0
    advertise: Annotated[
        str | None,
        setting(
            "--advertise",
            "host:port at which others reach it; by default host and port, "
            "with --host 0.0.0.0 the address that leads to Redis.",
            NETWORK,
        ),
    ] = None
    redis_url: RedisUrl = None
    cluster_secret: ClusterSecret = ""
    metrics_port: MetricsPort = 0
    grace_period: GracePeriod = GRACE_SECONDS
    otlp_endpoint: OtlpEndpoint = None
    log_level: LogLevel = "info"


@dataclass(frozen=True)
class PlacingSettings:
    """Settings of the router's choice of workers for a request."""

    policy: Annotated[
        Literal["random", "load", "approx", "precise"],
        setting(
            "--policy",
            "Place requests by chance, by load, by the router's own history of prefixes, or by the index.",
            ROUTING,
        ),
    ] = "precise"
    pulls: Annotated[
        Literal["never", "measured", "always"],
        setting("--pulls", "Copy blocks from peers: never, where measured to be sooner, or always.", ROUTING),
    ] = "measured"
    local_prefill_tokens: Annotated[
        int,
        setting(
            "--local-prefill-tokens",
            "A decode worker computes up to this many prompt tokens itself, where that is sooner.",
            ROUTING,
            min=0,
        ),
    ] = 64

    def config(self) -> PolicyConfig:
        """Return the planner's configuration."""
        from quire.routing.planner import PolicyConfig
        from quire.routing.policy import Policy, Pulls

        return PolicyConfig(
            policy=Policy(self.policy),
            pulls=Pulls(self.pulls),
            local_prefill_tokens=self.local_prefill_tokens,
        )


@dataclass(frozen=True)
class SloSettings:
    """Latency targets, by which answers count as good."""

    slo_ttft_ms: Annotated[
        float,
        setting(
            "--slo-ttft-ms", "Target for the first token, for the goodput metrics.", OBSERVABILITY, min=0
        ),
    ] = 1000
    slo_tpot_ms: Annotated[
        float,
        setting(
            "--slo-tpot-ms", "Target for each further token, for the goodput metrics.", OBSERVABILITY, min=0
        ),
    ] = 100

    def targets(self) -> SloTargets:
        """Return the targets in seconds."""
        from quire.services.router.slo import SloTargets

        return SloTargets(ttft_seconds=self.slo_ttft_ms / 1000, tpot_seconds=self.slo_tpot_ms / 1000)
