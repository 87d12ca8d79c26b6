"""The settings of the verbs that serve: names, help, types."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

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
