"""The verbs that serve: each reads its settings and hands them to the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from quire.cli import security
from quire.cli.failure import start_errors, usage_errors
from quire.cli.options import setting
from quire.cli.settings import (
    GRACE_SECONDS,
    LIMITS,
    MODEL,
    NETWORK,
    PROCESS,
    AdminPort,
    BlockSize,
    ClusterSecret,
    DiskCache,
    DraftModel,
    Dtype,
    DtypeOption,
    GracePeriod,
    Host,
    HostCache,
    HttpPort,
    IndexStride,
    KvCacheDtype,
    KvCacheDtypeOption,
    KvMemory,
    LocalPrefillTokens,
    LogLevel,
    LogLevelOption,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MetricsPort,
    Model,
    NumBlocks,
    NumSpeculativeTokens,
    OtlpEndpoint,
    PolicyOption,
    Preemption,
    PreemptionOption,
    PullsOption,
    RedisUrl,
    ServedModelName,
    SloTpotMs,
    SloTtftMs,
    Speculation,
    SpeculationOption,
    SwapMemory,
    Threads,
    VllmGrpc,
    WriteBack,
)


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
