"""Runs the router, the workers and Redis as processes on this machine, for ``quire serve``."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import grpc
import grpc.aio
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quire.kvtransfer.proof import Caller, Peer
from quire.protos.admin_pb2 import ListWorkersRequest
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.services.local.child_processes import (
    KILL_SECONDS,
    Child,
    Restarts,
    end_of,
    fork_server,
    start_children,
    stop_on_signals,
    stopped_at_end,
    wait_for_imports,
)
from quire.services.local.config import LocalStackConfig
from quire.services.local.redis_process import RedisProcess
from quire.services.local.router_processes import router_configs, run_router_process, shared_ports
from quire.services.router.app import RouterAddresses
from quire.services.server.errors import ServiceError
from quire.services.server.grpc_server import Draining
from quire.services.server.log import configure_logging, get_logger
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.services.worker_process import run_worker

JOIN_SECONDS = 30.0
JOIN_POLL_SECONDS = 0.05

WORKER_MODULES = (
    "quire.engine.engine_thread",
    "quire.engine.decode_graphs",
    "quire.engine.speculators",
    "quire.kvindex.redis_index",
    "quire.tokenization.tokenizer",
)
"""Modules that import torch, transformers and Numba, which takes seconds, but not gRPC."""

_log = get_logger("stack")


class StackFailedError(RuntimeError):
    """A process of the stack ended unexpectedly; its log says why."""


class RunningStack(NamedTuple):
    """A started stack whose router answers."""

    address: str
    admin_address: str
    http_address: str | None
    routers: dict[str, Child]
    workers: dict[str, Child]
    ready: dict[str, RunningWorker]
    caller: Caller
    """Signs calls to the workers."""
    restarts: Restarts
    """Starts router processes again."""

    def peer(self, name: str, channel: grpc.aio.Channel) -> Peer:
        """Return a peer for a worker's stubs, which signs the calls over ``channel``."""
        worker = self.ready[name]
        return Peer(channel, self.caller, worker.address, worker.epoch)


def run(config: LocalStackConfig, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Running requests may end within the router's grace period. A second signal ends all processes at once.

    Args:
        on_ready: called with the router's address once the stack can answer requests.

    Raises:
        SystemExit: the stack could not start, the router or all decode workers died, or a second signal came.
    """
    configure_logging(config.log_level, process="stack")
    console = Console(stderr=True)
    received = stop_on_signals()
    try:
        with local_stack(config, console) as stack:
            _print_banner(console, config, stack)
            if on_ready is not None:
                on_ready(stack.address)
            _watch(stack)
    except KeyboardInterrupt:
        if len(received) > 1:
            raise SystemExit(128 + received[-1]) from None
        console.print("stopped")
    except (StackFailedError, OSError, ValueError, ServiceError) as error:
        raise SystemExit(f"quire serve: {error}") from error


@contextmanager
def local_stack(config: LocalStackConfig, console: Console | None = None) -> Iterator[RunningStack]:
    """Start all processes, yield when the router answers, and stop them in the order router, workers, Redis.

    Raises:
        StackFailedError: a process ended before it was ready.
    """
    from_image = fork_server(WORKER_MODULES)
    with ExitStack() as stack:
        router_redis = worker_redis = config.redis_url
        if config.redis_url is None:
            redis = stack.enter_context(RedisProcess())
            router_redis, worker_redis = redis.router_url, redis.worker_url
        secret = os.environ.get("QUIRE_CLUSTER_SECRET", "").encode() or secrets.token_bytes(32)
        if config.worker.transport_dir is None:
            # One of its own, so that nothing is left of workers that are killed.
            folder = stack.enter_context(
                TemporaryDirectory(prefix="quire-pools-", ignore_cleanup_errors=True)
            )
            config = replace(config, worker=replace(config.worker, transport_dir=folder))
        show = partial(_show_drain, console)
        workers = stack.enter_context(stopped_at_end(config.worker.grace_seconds + KILL_SECONDS, show))
        router_config = replace(config.router, redis_url=router_redis, cluster_secret=secret)
        router_config = stack.enter_context(shared_ports(router_config))
        arguments = {name: (each, config.log_level) for name, each in router_configs(router_config).items()}
        routers = stack.enter_context(stopped_at_end(config.router.grace_seconds + KILL_SECONDS, show))
        start_children(routers, run_router_process, arguments)
        wait_for_imports(from_image)
        start_children(workers, run_worker, worker_configs(config, worker_redis, secret), from_image)
        # Start the progress bar only now: its thread would receive the signals that are blocked while
        # processes start.
        progress = stack.enter_context(_progress(console))
        ready: dict[str, RunningWorker] = {}
        addresses: dict[str, RouterAddresses] = {}
        for name, report in _reports([*routers.values(), *workers.values()], progress):
            if isinstance(report, RunningWorker):
                ready[name] = report
            else:
                addresses[name] = report
        progress.stop()
        for each in addresses.values():
            _wait_until_joined(each.admin, config)
        first = addresses[min(addresses)]
        restarts = Restarts(routers, run_router_process, arguments)
        caller = Caller(secret)
        yield RunningStack(first.grpc, first.admin, first.http, routers, workers, ready, caller, restarts)


# --- processes ----------------------------------------------------------------------------------------------


def worker_configs(config: LocalStackConfig, redis_url: str | None, secret: bytes) -> dict[str, WorkerConfig]:
    """Return the configuration of each worker, by name."""
    roles: list[Literal["prefill", "decode"]] = []
    roles += ["prefill"] * config.num_prefill
    roles += ["decode"] * config.num_decode
    shares = divide_processors(sorted(os.sched_getaffinity(0)), len(roles))
    metrics_port = config.router.metrics_port
    counts: dict[str, int] = {}
    configs = {}
    for index, (role, cpus) in enumerate(zip(roles, shares, strict=True)):
        name = f"{role}-{counts.get(role, 0)}"
        counts[role] = counts.get(role, 0) + 1
        configs[name] = replace(
            config.worker,
            role=role,
            worker_id=name,
            redis_url=redis_url,
            cluster_secret=secret,
            metrics_port=metrics_port + 1 + index if metrics_port else 0,
            disk_cache=config.worker.disk_cache and config.worker.disk_cache.of(name),
            num_sharing_gpu=len(roles),
            cpus=tuple(cpus),
            # The whole stack ends together, so no router needs time to notice that a worker leaves.
            notice_seconds=0.0,
            log_level=config.log_level,
        )
    return configs


def divide_processors(cpus: list[int], num_workers: int) -> list[list[int]]:
    """Return a separate set of processors for each worker.

    With fewer processors than workers, each worker gets one processor, in turn.
    """
    if len(cpus) < num_workers:
        return [[cpus[index % len(cpus)]] for index in range(num_workers)]
    return [cpus[index::num_workers] for index in range(num_workers)]


def _reports(
    children: list[Child], progress: Progress
) -> Iterator[tuple[str, RunningWorker | RouterAddresses]]:
    """Yield each child's name and its report that it is ready.

    Raises:
        StackFailedError: a child ended before it was ready.
    """
    bar = progress.add_task("starting", total=len(children), waiting="")
    pending = {child.pipe: child for child in children}
    while pending:
        progress.update(bar, waiting=", ".join(child.name for child in pending.values()))
        for pipe in [pipe for pipe in wait(list(pending)) if isinstance(pipe, Connection)]:
            child = pending.pop(pipe)
            try:
                report = child.pipe.recv()
            except EOFError:
                report = RuntimeError("it ended without a word; its log above says why")
            if isinstance(report, Exception):
                raise StackFailedError(f"{child.name} did not start: {report}")
            progress.advance(bar)
            yield child.name, report


def _wait_until_joined(admin_address: str, config: LocalStackConfig) -> None:
    """Wait until the router knows every worker, so that the first request can use the whole stack.

    Raises:
        StackFailedError: a worker is still unknown after ``JOIN_SECONDS``.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    with grpc.insecure_channel(admin_address) as channel:
        stub = AdminServiceStub(channel)
        while True:
            known = stub.ListWorkers(ListWorkersRequest(), timeout=JOIN_SECONDS, wait_for_ready=True)
            if len(known.workers) == config.num_prefill + config.num_decode:
                return
            if time.monotonic() > deadline:
                raise StackFailedError(f"not all workers found the router within {JOIN_SECONDS:.0f} s")
            time.sleep(JOIN_POLL_SECONDS)


def _watch(stack: RunningStack) -> None:
    """Wait as long as a router and at least one decode worker run; log each process that ends.

    If there are several router processes, one that ends is started again.

    Raises:
        StackFailedError: the only router or the last decode worker ended.
    """
    alive = {child.process.sentinel: child for child in (*stack.routers.values(), *stack.workers.values())}
    while True:
        for sentinel in wait(list(alive), stack.restarts.seconds):
            child = alive.pop(sentinel)  # type: ignore[arg-type]
            end = end_of(child.process)
            _log.error("process_ended", name=child.name, end=end)
            is_router = child.name in stack.routers
            has_decode = any(c.name.startswith("decode") for c in alive.values())
            if not has_decode or (is_router and len(stack.routers) == 1):
                raise StackFailedError(f"{child.name} {end}")
            if is_router:
                stack.restarts.schedule(child.name)
        alive |= {child.process.sentinel: child for child in stack.restarts.start_due()}


# --- output on the terminal ---------------------------------------------------------------------------------


def _progress(console: Console | None) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[waiting]}"),
        console=console or Console(stderr=True, quiet=True),
        transient=True,
    )


def _print_banner(console: Console, config: LocalStackConfig, stack: RunningStack) -> None:
    some = next(iter(stack.ready.values()))
    show = partial(console.print, soft_wrap=True)
    has_tls, has_keys = config.router.public_tls is not None, config.router.api_keys_file is not None
    kind = "gRPC" + ", TLS" * has_tls + ", API keys" * has_keys
    show(f"[bold]quire[/bold] serves [bold]{some.model}[/bold] at {stack.address} ({kind})")
    if stack.http_address is not None:
        scheme = "https" if has_tls else "http"
        show(f"  http       {scheme}://{stack.http_address}/v1 (OpenAI)")
    for name, worker in sorted(stack.ready.items()):
        capacity = worker.num_blocks * config.worker.block_size
        show(
            f"  {name:<10} {worker.address}  {worker.num_blocks} blocks = {capacity} tokens of KV, "
            f"metrics at :{worker.metrics_port}"
        )
    show(f"  admin      {stack.admin_address}")
    redis = "127.0.0.1, private" if config.redis_url is None else config.redis_url.rpartition("@")[2]
    show(f"  redis      {redis}; requests up to {some.max_model_len} tokens")


def _show_drain(console: Console | None, waiting: Draining) -> None:
    if console is None or not waiting.num_requests:
        return
    requests = "1 request" if waiting.num_requests == 1 else f"{waiting.num_requests} requests"
    if waiting.seconds_left:
        left = f"{waiting.seconds_left:.0f} s left"
        console.print(f"stopping: waiting for {requests}, {left}; Ctrl-C again ends at once", soft_wrap=True)
    else:
        console.print(f"stopping: the grace period is over, {requests} cut off", soft_wrap=True)
