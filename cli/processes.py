"""The verbs that serve: each reads its settings and passes them to the service."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Annotated

import typer

from quire.cli.failure import fail, start_errors, usage_errors
from quire.cli.setting_options import OptionRules
from quire.cli.spread import spread
from quire.services.local.config import LocalStackConfig
from quire.services.router.config import DEFAULT_HTTP_PORT, RouterConfig
from quire.services.server.config import ServiceConfig
from quire.services.worker.config import WorkerConfig

SPECULATION = ("speculation", "num_speculative_tokens")
"""Settings of decode workers only; a prefill worker samples one token of a request."""

SHARED_IN_STACK = ("served_model_name", "cluster_cert", "cluster_key", "cluster_ca")
"""Settings that the router and the workers of a local stack have in common."""

# The settings of each verb, which `quire doctor` reads too.
STACK_WORKER = Annotated[
    WorkerConfig,
    OptionRules(
        fixed={"role": "decode", "kv_events": None},  # each worker would need its own address
        omitted=(
            *(each.name for each in fields(ServiceConfig) if each.name not in SHARED_IN_STACK),
            "port",
            "advertise",
            "arithmetic",  # one machine has processors of one kind
        ),
    ),
]
STACK = Annotated[LocalStackConfig, OptionRules(omitted=("router", "worker"))]
STACK_ROUTER = Annotated[
    RouterConfig,
    OptionRules(
        omitted=(
            "cluster_secret",
            "worker_addresses",
            "model",
            "max_requests",
        ),
        defaults={"log_level": "warning"},
        shown={"http_port": f"{DEFAULT_HTTP_PORT} where the extra http is installed"},
    ),
]
ROUTER = Annotated[RouterConfig, OptionRules(defaults={"metrics_port": 8501})]
PREFILL = Annotated[WorkerConfig, OptionRules(fixed={"role": "prefill"}, omitted=SPECULATION)]
DECODE = Annotated[WorkerConfig, OptionRules(fixed={"role": "decode"})]


@spread
def serve(
    *,
    worker: STACK_WORKER,
    stack: STACK,
    router: STACK_ROUTER,
    example: Annotated[
        bool, typer.Option("--example", help="Once ready, ask one question through the public port.")
    ] = False,
) -> None:
    """Serve a model with a router, prefill and decode workers and their own Redis, here or on Ray."""
    from quire.services.local import stack as local_stack

    config = stack_config(worker, stack, router)
    if config.ray is None:
        _check_packages()
    on_ready = _ask_example if example else None
    with start_errors():
        if config.ray is None:
            local_stack.run(config, on_ready)
        else:
            from quire.services.ray_cluster.ray_launcher import ray_launcher

            local_stack.run(config, on_ready, ray_launcher(config.ray))


def stack_config(worker: WorkerConfig, stack: LocalStackConfig, router: RouterConfig) -> LocalStackConfig:
    """Return the configuration of a stack, with the HTTP API if its packages are installed."""
    from quire.services.router.public_servers import has_http

    if router.http_port is None and has_http():
        with usage_errors():
            router = replace(router, http_port=DEFAULT_HTTP_PORT)
    worker = replace(worker, grace_seconds=router.grace_seconds)
    return replace(
        stack, router=router, worker=worker, redis_url=router.redis_url, log_level=router.log_level
    )


@spread
def router(*, config: ROUTER) -> None:
    """Run a router, which offers the public gRPC service in front of the workers."""
    if config.num_processes > 1:
        from quire.services.local.router_processes import run_router_processes

        with start_errors():
            run_router_processes(config)
        return
    import asyncio

    from quire.services.router.app import run_router
    from quire.services.server.log import configure_logging

    configure_logging(config.log_level, process="router")
    with start_errors():
        asyncio.run(run_router(config))


@spread
def prefill(*, config: PREFILL) -> None:
    """Run a prefill worker, which computes KV blocks of prompts and sends them to decode workers."""
    _run_worker(config)


@spread
def decode(*, config: DECODE) -> None:
    """Run a decode worker, which receives KV blocks of prompts and generates the answers."""
    _run_worker(config)


def _check_packages() -> None:
    if find_spec("torch") is None:
        fail("workers need the extra 'worker': in quire's clone, run .venv/bin/pip install -e '.[worker]'")


def _run_worker(config: WorkerConfig) -> None:
    _check_packages()
    from quire.services.worker_process import run_worker

    with start_errors():
        run_worker(config)


def _ask_example(address: str) -> None:
    """Ask the example from a separate thread, since the caller may be the event loop that serves it."""
    from quire.cli.example import ask_example

    threading.Thread(target=ask_example, args=(address,), name="example", daemon=True).start()
