"""The verbs that serve: each reads its settings and hands them to the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Literal

import typer

from quire.cli import security
from quire.cli.failure import start_errors, usage_errors
from quire.cli.options import setting
from quire.cli.sizes import parse_folder_and_size, parse_size

GRACE_SECONDS = 25.0
"""Below the 30 s after which Kubernetes kills."""

NETWORK, MODEL, CACHE, LIMITS, PROCESS = "Network", "Model", "KV cache", "Batch limits", "Process"
ROUTING = "Routing"
OBSERVABILITY = "Observability"


class Dtype(StrEnum):
    """Type of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KvCacheDtype(StrEnum):
    """Type of the KV cache alone."""

    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"


class Preemption(StrEnum):
    """What becomes of a request whose blocks are taken for an older one."""

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


class Speculation(StrEnum):
    """Who guesses tokens."""

    OFF = "off"
    NGRAM = "ngram"
    DRAFT = "draft"


class LogLevel(StrEnum):
    """Least severity of the events that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder or hub id of the model; by default the bundled demo.",
        envvar="QUIRE_MODEL",
        metavar="MODEL",
    ),
]
ServedModelName = Annotated[
    str | None, setting("--served-model-name", "Name that clients use; by default the model's.", MODEL)
]
DtypeOption = Annotated[Dtype, setting("--dtype", "Type of weights and KV cache.", MODEL)]
KvCacheDtypeOption = Annotated[
    KvCacheDtype,
    setting("--kv-cache-dtype", "Type of the KV cache: the model's, or 8 bits, less exact.", CACHE),
]
MaxModelLen = Annotated[
    int | None,
    setting("--max-model-len", "Most tokens of prompt and answer; by default the model's.", MODEL, min=1),
]
Host = Annotated[str, setting("--host", "Address to listen on.", NETWORK)]
RedisUrl = Annotated[
    str | None, setting("--redis-url", "Redis of the prefix index and of membership.", NETWORK)
]
MetricsPort = Annotated[
    int, setting("--metrics-port", "Port of the Prometheus metrics; 0 takes a free one.", NETWORK, min=0)
]
ClusterSecret = Annotated[
    str,
    setting(
        "--cluster-secret",
        "Keys the block hashes; the same for router and workers. Better given by the variable.",
        NETWORK,
        show_default=False,
    ),
]
AdminPort = Annotated[
    int, setting("--admin-port", "Port for `quire admin`; 0 takes a free one.", NETWORK, min=0)
]
BlockSize = Annotated[int, setting("--block-size", "Tokens in a KV block.", CACHE, min=1)]
KvMemory = Annotated[
    int | None,
    setting(
        "--kv-memory", "Memory for KV blocks, as 512MiB or 2GiB.", CACHE, parser=parse_size, metavar="SIZE"
    ),
]
NumBlocks = Annotated[
    int | None, setting("--num-blocks", "KV blocks of a worker; instead of --kv-memory.", CACHE, min=1)
]
SwapMemory = Annotated[
    int,
    setting(
        "--swap-memory",
        "Host memory for the blocks of preempted requests, as 64MiB; 0 for none.",
        CACHE,
        parser=parse_size,
        metavar="SIZE",
    ),
]
HostCache = Annotated[
    int,
    setting(
        "--host-cache",
        "Host memory for cached blocks that the pool evicts, as 1GiB; 0 for none.",
        CACHE,
        parser=parse_size,
        metavar="SIZE",
    ),
]
DiskCache = Annotated[
    tuple[str, int] | None,
    setting(
        "--disk-cache",
        "Folder and size for cached blocks that the host cache evicts, as /var/cache/quire:20GiB.",
        CACHE,
        parser=parse_folder_and_size,
        metavar="FOLDER:SIZE",
    ),
]
IndexStride = Annotated[
    int,
    setting("--index-stride", "Publish every k-th block: a k-th of the index's memory.", CACHE, min=1),
]
WriteBack = Annotated[
    bool,
    setting(
        "--write-back",
        "Prefill workers copy the blocks of answers in idle time, for the next turn.",
        CACHE,
    ),
]
PreemptionOption = Annotated[
    Preemption,
    setting("--preemption", "Bring preempted requests back from host memory or compute them again.", CACHE),
]
SpeculationOption = Annotated[
    Speculation,
    setting(
        "--speculation",
        "How decode workers guess tokens that a step then verifies: by earlier text or a draft model.",
        MODEL,
    ),
]
NumSpeculativeTokens = Annotated[
    int,
    setting("--num-speculative-tokens", "Most guesses for one sequence in a step.", MODEL, min=1, max=7),
]
DraftModel = Annotated[
    str | None,
    setting("--draft-model", "Folder or hub id of the model of --speculation draft.", MODEL),
]
MaxNumSeqs = Annotated[int, setting("--max-num-seqs", "Most sequences in a step.", LIMITS, min=1)]
MaxNumBatchedTokens = Annotated[
    int, setting("--max-num-batched-tokens", "Most tokens in a step.", LIMITS, min=1)
]
Threads = Annotated[
    int | None,
    setting("--threads", "CPU threads of a worker; by default its share of the cores.", PROCESS, min=1),
]
GracePeriod = Annotated[
    float,
    setting("--grace-period", "How long requests may go on after SIGTERM, in seconds.", PROCESS, min=0),
]
PolicyOption = Annotated[
    Literal["random", "load", "approx", "precise"],
    setting(
        "--policy",
        "Place requests by chance, by load, by the router's own history of prefixes, or by the index.",
        ROUTING,
    ),
]
PullsOption = Annotated[
    Literal["never", "measured", "always"],
    setting("--pulls", "Copy blocks from peers: never, where measured to be sooner, or always.", ROUTING),
]
LocalPrefillTokens = Annotated[
    int,
    setting(
        "--local-prefill-tokens",
        "A decode worker computes up to this many prompt tokens itself, where that is sooner.",
        ROUTING,
        min=0,
    ),
]
SloTtftMs = Annotated[
    float,
    setting("--slo-ttft-ms", "Target for the first token, for the goodput metrics.", OBSERVABILITY, min=0),
]
SloTpotMs = Annotated[
    float,
    setting("--slo-tpot-ms", "Target for each further token, for the goodput metrics.", OBSERVABILITY, min=0),
]
OtlpEndpoint = Annotated[
    str | None,
    setting(
        "--otlp-endpoint",
        "Send traces there by OTLP/gRPC, as http://host:4317; needs the extra 'tracing'.",
        OBSERVABILITY,
    ),
]
VllmGrpc = Annotated[
    bool,
    setting(
        "--vllm-grpc",
        "Workers serve vllm.grpc.engine.VllmEngine too, for gateways of vLLM (extra vllm-grpc).",
        NETWORK,
    ),
]
LogLevelOption = Annotated[LogLevel, setting("--log-level", "Least severity of logged events.", PROCESS)]


HttpPort = Annotated[
    int | None,
    setting("--http-port", "Port of the OpenAI-compatible API; 0 takes a free one.", NETWORK, min=0),
]


def serve(
    model: Model = None,
    num_prefill: Annotated[int, setting("--prefill", "Prefill workers.", PROCESS, min=0)] = 1,
    num_decode: Annotated[int, setting("--decode", "Decode workers.", PROCESS, min=1)] = 1,
    host: Host = "127.0.0.1",
    port: Annotated[int, setting("--port", "Public gRPC port; 0 takes a free one.", NETWORK, min=0)] = 8500,
    http_port: Annotated[
        int | None,
        setting(
            "--http-port",
            "Port of the OpenAI-compatible API; 0 takes a free one.",
            NETWORK,
            min=0,
            show_default="8502 where the extra http is installed",
        ),
    ] = None,
    redis_url: RedisUrl = None,
    metrics_port: MetricsPort = 0,
    served_model_name: ServedModelName = None,
    dtype: DtypeOption = Dtype.AUTO,
    kv_cache_dtype: KvCacheDtypeOption = KvCacheDtype.AUTO,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    kv_memory: KvMemory = None,
    num_blocks: NumBlocks = None,
    swap_memory: SwapMemory = "64MiB",  # type: ignore[assignment]  # typer parses it
    host_cache: HostCache = "0",  # type: ignore[assignment]
    disk_cache: DiskCache = None,
    index_stride: IndexStride = 1,
    write_back: WriteBack = False,
    preemption: PreemptionOption = Preemption.AUTO,
    speculation: SpeculationOption = Speculation.OFF,
    num_speculative_tokens: NumSpeculativeTokens = 4,
    draft_model: DraftModel = None,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    threads: Threads = None,
    admin_port: AdminPort = 0,
    api_keys: security.ApiKeysFile = None,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    tls_client_ca: security.TlsClientCa = None,
    cluster_cert: security.ClusterCert = None,
    cluster_key: security.ClusterKey = None,
    cluster_ca: security.ClusterCa = None,
    vllm_grpc: VllmGrpc = False,
    policy: PolicyOption = "precise",
    pulls: PullsOption = "measured",
    local_prefill_tokens: LocalPrefillTokens = 64,
    slo_ttft_ms: SloTtftMs = 1000,
    slo_tpot_ms: SloTpotMs = 100,
    otlp_endpoint: OtlpEndpoint = None,
    log_level: LogLevelOption = LogLevel.WARNING,
    example: Annotated[
        bool, typer.Option("--example", help="Once ready, ask one question through the public port.")
    ] = False,
) -> None:
    """Serve a model on this machine: a router, prefill and decode workers, and a Redis of their own."""
    from quire.services.local_stack import LocalStackConfig, run
    from quire.services.router.app import DEFAULT_HTTP_PORT, has_http
    from quire.services.router.planner import PolicyConfig
    from quire.services.router.policy import Policy, Pulls
    from quire.services.router.slo import SloTargets
    from quire.services.worker.app import DiskFolder

    with usage_errors():
        config = LocalStackConfig(
            model=model,
            num_prefill=num_prefill,
            num_decode=num_decode,
            host=host,
            port=port,
            http_port=DEFAULT_HTTP_PORT if http_port is None and has_http() else http_port,
            redis_url=redis_url,
            metrics_port=metrics_port,
            served_model_name=served_model_name,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_memory_bytes=kv_memory,
            num_blocks=num_blocks,
            swap_memory_bytes=swap_memory,
            host_cache_bytes=host_cache,
            disk_cache=DiskFolder(*disk_cache) if disk_cache else None,
            index_stride=index_stride,
            write_back=write_back,
            preemption=preemption.value,
            speculation=speculation.value,
            num_speculative_tokens=num_speculative_tokens,
            draft_model=draft_model,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            threads=threads,
            admin_port=admin_port,
            api_keys_file=api_keys,
            public_tls=security.public_tls(tls_cert, tls_key, tls_client_ca),
            cluster_tls=security.cluster_tls(cluster_cert, cluster_key, cluster_ca),
            vllm_grpc=vllm_grpc,
            placing=PolicyConfig(
                policy=Policy(policy), pulls=Pulls(pulls), local_prefill_tokens=local_prefill_tokens
            ),
            slo=SloTargets(ttft_seconds=slo_ttft_ms / 1000, tpot_seconds=slo_tpot_ms / 1000),
            otlp_endpoint=otlp_endpoint,
            log_level=log_level,
        )
    with start_errors():
        run(config, on_ready=_ask_example if example else None)


def router(
    host: Host = "127.0.0.1",
    port: Annotated[int, setting("--port", "Public gRPC port; 0 takes a free one.", NETWORK, min=0)] = 8500,
    http_port: HttpPort = None,
    redis_url: RedisUrl = None,
    workers: Annotated[
        list[str] | None,
        setting(
            "--worker", "host:port of a worker, instead of finding it in Redis; may be repeated.", NETWORK
        ),
    ] = None,
    cluster_secret: ClusterSecret = "",
    metrics_port: MetricsPort = 8501,
    model: Annotated[
        str | None,
        setting("--model", "Folder or hub id of tokenizer and template; by default the workers'.", MODEL),
    ] = None,
    served_model_name: ServedModelName = None,
    max_requests: Annotated[
        int, setting("--max-requests", "Most requests under way; more are refused.", LIMITS, min=1)
    ] = 1024,
    request_timeout: Annotated[
        float, setting("--request-timeout", "Longest deadline of a request, in seconds.", LIMITS, min=0.001)
    ] = 600.0,
    policy: PolicyOption = "precise",
    pulls: PullsOption = "measured",
    local_prefill_tokens: LocalPrefillTokens = 64,
    grace_period: GracePeriod = GRACE_SECONDS,
    admin_host: Annotated[
        str,
        setting("--admin-host", "Address of the admin port; beyond the loopback it takes mTLS.", NETWORK),
    ] = "127.0.0.1",
    admin_port: AdminPort = 8503,
    api_keys: security.ApiKeysFile = None,
    tls_cert: security.TlsCert = None,
    tls_key: security.TlsKey = None,
    tls_client_ca: security.TlsClientCa = None,
    cluster_cert: security.ClusterCert = None,
    cluster_key: security.ClusterKey = None,
    cluster_ca: security.ClusterCa = None,
    write_back: WriteBack = False,
    slo_ttft_ms: SloTtftMs = 1000,
    slo_tpot_ms: SloTpotMs = 100,
    otlp_endpoint: OtlpEndpoint = None,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run a router: the public gRPC service in front of the workers."""
    from quire.services.log import configure_logging
    from quire.services.router.app import RouterConfig, run_router
    from quire.services.router.planner import PolicyConfig
    from quire.services.router.policy import Policy, Pulls
    from quire.services.router.slo import SloTargets

    configure_logging(log_level, role="router")
    with usage_errors():
        config = RouterConfig(
            host=host,
            port=port,
            http_port=http_port,
            redis_url=redis_url,
            worker_addresses=tuple(workers or ()),
            cluster_secret=cluster_secret.encode(),
            metrics_port=metrics_port,
            model=model,
            served_model_name=served_model_name,
            max_requests=max_requests,
            request_timeout_seconds=request_timeout,
            placing=PolicyConfig(
                policy=Policy(policy), pulls=Pulls(pulls), local_prefill_tokens=local_prefill_tokens
            ),
            grace_seconds=grace_period,
            admin_host=admin_host,
            admin_port=admin_port,
            api_keys_file=api_keys,
            public_tls=security.public_tls(tls_cert, tls_key, tls_client_ca),
            cluster_tls=security.cluster_tls(cluster_cert, cluster_key, cluster_ca),
            write_back=write_back,
            slo=SloTargets(ttft_seconds=slo_ttft_ms / 1000, tpot_seconds=slo_tpot_ms / 1000),
            otlp_endpoint=otlp_endpoint,
        )
    with start_errors():
        asyncio.run(run_router(config))


def worker_verb(role: Literal["prefill", "decode"]) -> Callable[..., None]:
    """Return the verb that runs a worker of a role."""

    def worker(
        model: Model = None,
        host: Host = "127.0.0.1",
        port: Annotated[int, setting("--port", "gRPC port; 0 takes a free one.", NETWORK, min=0)] = 0,
        advertise: Annotated[
            str | None,
            setting(
                "--advertise",
                "host:port at which others reach it; by default host and port, "
                "with --host 0.0.0.0 the address that leads to Redis.",
                NETWORK,
            ),
        ] = None,
        redis_url: RedisUrl = None,
        cluster_secret: ClusterSecret = "",
        metrics_port: MetricsPort = 0,
        served_model_name: ServedModelName = None,
        dtype: DtypeOption = Dtype.AUTO,
        kv_cache_dtype: KvCacheDtypeOption = KvCacheDtype.AUTO,
        max_model_len: MaxModelLen = None,
        block_size: BlockSize = 16,
        kv_memory: KvMemory = None,
        num_blocks: NumBlocks = None,
        swap_memory: SwapMemory = "64MiB",  # type: ignore[assignment]  # typer parses it
        host_cache: HostCache = "0",  # type: ignore[assignment]
        disk_cache: DiskCache = None,
        index_stride: IndexStride = 1,
        preemption: PreemptionOption = Preemption.AUTO,
        speculation: SpeculationOption = Speculation.OFF,
        num_speculative_tokens: NumSpeculativeTokens = 4,
        draft_model: DraftModel = None,
        max_num_seqs: MaxNumSeqs = 64,
        max_num_batched_tokens: MaxNumBatchedTokens = 512,
        threads: Threads = None,
        grace_period: GracePeriod = GRACE_SECONDS,
        cluster_cert: security.ClusterCert = None,
        cluster_key: security.ClusterKey = None,
        cluster_ca: security.ClusterCa = None,
        vllm_grpc: VllmGrpc = False,
        otlp_endpoint: OtlpEndpoint = None,
        log_level: LogLevelOption = LogLevel.INFO,
    ) -> None:
        from quire.services.worker.app import DiskFolder, WorkerConfig, run_worker

        with usage_errors():
            config = WorkerConfig(
                role=role,
                model=model,
                host=host,
                port=port,
                advertise=advertise,
                redis_url=redis_url,
                cluster_secret=cluster_secret.encode(),
                metrics_port=metrics_port,
                served_model_name=served_model_name,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                max_model_len=max_model_len,
                block_size=block_size,
                kv_memory_bytes=kv_memory,
                num_blocks=num_blocks,
                swap_memory_bytes=swap_memory,
                host_cache_bytes=host_cache,
                disk_cache=DiskFolder(*disk_cache) if disk_cache else None,
                index_stride=index_stride,
                preemption=preemption.value,
                speculation=speculation.value,
                num_speculative_tokens=num_speculative_tokens,
                draft_model=draft_model,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                threads=threads,
                grace_seconds=grace_period,
                cluster_tls=security.cluster_tls(cluster_cert, cluster_key, cluster_ca),
                vllm_grpc=vllm_grpc,
                otlp_endpoint=otlp_endpoint,
                log_level=log_level,
            )
        with start_errors():
            run_worker(config)

    return worker


def _ask_example(address: str) -> None:
    """Ask from a thread of its own: the caller may be the event loop that serves the answer."""
    from quire.cli.example import ask_example

    threading.Thread(target=ask_example, args=(address,), name="example", daemon=True).start()
