"""The verbs that serve: each reads its settings and passes them to the service."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.failure import start_errors, usage_errors
from quire.cli.options import setting
from quire.cli.security import ClusterSecurity, PublicSecurity
from quire.cli.settings import (
    DEFAULT_ADMIN_PORT,
    GRACE_SECONDS,
    LIMITS,
    MAX_PORT,
    MODEL,
    NETWORK,
    PROCESS,
    AdminPort,
    ClusterSecret,
    EngineSettings,
    GracePeriod,
    Host,
    LogLevel,
    MetricsPort,
    OtlpEndpoint,
    PlacingSettings,
    PublicPort,
    RedisUrl,
    ServedModelName,
    SloSettings,
    SpeculationSettings,
    WorkerSettings,
    WriteBack,
    check_addresses,
)
from quire.cli.spread import spread

if TYPE_CHECKING:
    from quire.services.worker.config import WorkerConfig


@spread
def serve(
    *,
    engine: EngineSettings,
    num_prefill: Annotated[int, setting("--prefill", "Prefill workers.", PROCESS, min=0)] = 1,
    num_decode: Annotated[int, setting("--decode", "Decode workers.", PROCESS, min=1)] = 1,
    host: Host = "127.0.0.1",
    port: PublicPort = 8500,
    http_port: Annotated[
        int | None,
        setting(
            "--http-port",
            "Port of the OpenAI-compatible API; 0 takes a free one.",
            NETWORK,
            min=0,
            max=MAX_PORT,
            show_default="8502 where the extra http is installed",
        ),
    ] = None,
    redis_url: RedisUrl = None,
    metrics_port: MetricsPort = 0,
    admin_port: Annotated[
        int | None,
        setting(
            "--admin-port",
            "Port for `quire admin`; 0 takes a free one.",
            NETWORK,
            min=0,
            max=MAX_PORT,
            show_default="8503, or a free one where --port is 0",
        ),
    ] = None,
    public: PublicSecurity,
    cluster: ClusterSecurity,
    speculation: SpeculationSettings,
    placing: PlacingSettings,
    slo: SloSettings,
    write_back: WriteBack = False,
    grace_period: GracePeriod = GRACE_SECONDS,
    otlp_endpoint: OtlpEndpoint = None,
    log_level: LogLevel = "warning",
    example: Annotated[
        bool, typer.Option("--example", help="Once ready, ask one question through the public port.")
    ] = False,
) -> None:
    """Serve a model on this machine, with a router, prefill and decode workers, and their own Redis."""
    from quire.services.local.stack import LocalStackConfig, run
    from quire.services.router.app import DEFAULT_HTTP_PORT, RouterConfig, has_http

    with usage_errors():
        cluster_tls = cluster.tls()
        router = RouterConfig(
            host=host,
            port=port,
            http_port=DEFAULT_HTTP_PORT if http_port is None and has_http() else http_port,
            metrics_port=metrics_port,
            served_model_name=engine.served_model_name,
            admin_port=(DEFAULT_ADMIN_PORT if port else 0) if admin_port is None else admin_port,
            api_keys_file=public.api_keys,
            public_tls=public.tls(),
            cluster_tls=cluster_tls,
            placing=placing.config(),
            slo=slo.targets(),
            write_back=write_back,
            grace_seconds=grace_period,
            otlp_endpoint=otlp_endpoint,
        )
        worker = replace(
            _guessing(engine.config("decode"), speculation),
            cluster_tls=cluster_tls,
            otlp_endpoint=otlp_endpoint,
        )
        config = LocalStackConfig(
            num_prefill=num_prefill,
            num_decode=num_decode,
            redis_url=redis_url,
            router=router,
            worker=worker,
            log_level=log_level,
        )
    with start_errors():
        run(config, on_ready=_ask_example if example else None)


@spread
def router(
    *,
    host: Host = "127.0.0.1",
    port: PublicPort = 8500,
    http_port: Annotated[
        int | None,
        setting(
            "--http-port",
            "Port of the OpenAI-compatible API; 0 takes a free one.",
            NETWORK,
            min=0,
            max=MAX_PORT,
        ),
    ] = None,
    redis_url: RedisUrl = None,
    workers: Annotated[
        list[str] | None,
        setting(
            "--worker",
            "host:port of a worker, instead of finding it in Redis; may be repeated.",
            NETWORK,
            callback=check_addresses,
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
        int,
        setting(
            "--max-requests", "Most answers under way, n of each request; more are refused.", LIMITS, min=1
        ),
    ] = 1024,
    request_timeout: Annotated[
        float, setting("--request-timeout", "Longest deadline of a request, in seconds.", LIMITS, min=0.001)
    ] = 600.0,
    placing: PlacingSettings,
    grace_period: GracePeriod = GRACE_SECONDS,
    admin_host: Annotated[
        str,
        setting("--admin-host", "Address of the admin port; beyond the loopback it takes mTLS.", NETWORK),
    ] = "127.0.0.1",
    admin_port: AdminPort = DEFAULT_ADMIN_PORT,
    public: PublicSecurity,
    cluster: ClusterSecurity,
    slo: SloSettings,
    write_back: WriteBack = False,
    otlp_endpoint: OtlpEndpoint = None,
    log_level: LogLevel = "info",
) -> None:
    """Run a router, which offers the public gRPC service in front of the workers."""
    import asyncio

    from quire.services.router.app import RouterConfig, run_router
    from quire.services.server.log import configure_logging

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
            placing=placing.config(),
            grace_seconds=grace_period,
            admin_host=admin_host,
            admin_port=admin_port,
            api_keys_file=public.api_keys,
            public_tls=public.tls(),
            cluster_tls=cluster.tls(),
            write_back=write_back,
            slo=slo.targets(),
            otlp_endpoint=otlp_endpoint,
        )
    with start_errors():
        asyncio.run(run_router(config))


@spread
def prefill(*, engine: EngineSettings, worker: WorkerSettings, cluster: ClusterSecurity) -> None:
    """Run a prefill worker, which computes KV blocks of prompts and sends them to decode workers."""
    with usage_errors():
        config = _by_itself(engine.config("prefill"), worker, cluster)
    _run_worker(config)


@spread
def decode(
    *,
    engine: EngineSettings,
    speculation: SpeculationSettings,
    worker: WorkerSettings,
    cluster: ClusterSecurity,
) -> None:
    """Run a decode worker, which receives KV blocks of prompts and generates the answers."""
    with usage_errors():
        config = _by_itself(_guessing(engine.config("decode"), speculation), worker, cluster)
    _run_worker(config)


def _guessing(config: WorkerConfig, speculation: SpeculationSettings) -> WorkerConfig:
    """Return a worker's configuration with its source of draft tokens."""
    return replace(
        config,
        speculation=speculation.speculation,
        num_speculative_tokens=speculation.num_speculative_tokens,
        draft_model=speculation.draft_model,
    )


def _by_itself(config: WorkerConfig, worker: WorkerSettings, cluster: ClusterSecurity) -> WorkerConfig:
    return replace(
        config,
        host=worker.host,
        port=worker.port,
        advertise=worker.advertise,
        redis_url=worker.redis_url,
        cluster_secret=worker.cluster_secret.encode(),
        metrics_port=worker.metrics_port,
        grace_seconds=worker.grace_period,
        cluster_tls=cluster.tls(),
        otlp_endpoint=worker.otlp_endpoint,
        log_level=worker.log_level,
    )


def _run_worker(config: WorkerConfig) -> None:
    from quire.services.worker_process import run_worker

    with start_errors():
        run_worker(config)


def _ask_example(address: str) -> None:
    """Ask the example from a separate thread, since the caller may be the event loop that serves it."""
    from quire.cli.example import ask_example

    threading.Thread(target=ask_example, args=(address,), name="example", daemon=True).start()
