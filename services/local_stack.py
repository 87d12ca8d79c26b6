"""Runs router, workers and Redis on this machine, as processes of their own: what ``quire serve`` starts."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Literal, NamedTuple

import grpc
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quire.protos.admin_pb2 import ListWorkersRequest
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.services.errors import ServiceError
from quire.services.log import configure_logging, get_logger
from quire.services.redis_process import RedisProcess, end_with_parent
from quire.services.router.app import RouterAddresses, RouterConfig, RunningRouter, run_router
from quire.services.worker.app import RunningWorker, WorkerConfig, run_worker

JOIN_SECONDS = 30.0
JOIN_POLL_SECONDS = 0.05

_log = get_logger("stack")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStackConfig:
    """What a local stack needs to know."""

    num_prefill: int = 1
    num_decode: int = 1
    redis_url: str | None = field(default=None, repr=False)
    """None runs a Redis."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Of the router; Redis and secret are filled in. The workers' metrics ports follow its own."""
    worker: WorkerConfig = field(default_factory=lambda: WorkerConfig(role="decode"))
    """Of all workers; role, name, Redis, secret, processors and ports are filled in."""
    log_level: str = "warning"
    stop_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.num_decode < 1:
            raise ValueError("--decode must be at least 1: decode workers generate the tokens")


class StackFailedError(RuntimeError):
    """A process of the stack ended by itself; its log says why."""


class Child(NamedTuple):
    """A started process and the pipe on which it reports that it is ready."""

    name: str
    process: SpawnProcess
    pipe: Connection


class RunningStack(NamedTuple):
    """A stack that answers."""

    address: str
    admin_address: str
    http_address: str | None
    router: Child
    workers: dict[str, Child]
    ready: dict[str, RunningWorker]


def run(config: LocalStackConfig, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; ``on_ready`` gets the router's address once an answer can be had.

    Raises:
        SystemExit: the stack could not start, or all of a kind of its processes died.
    """
    configure_logging(config.log_level, process="stack")
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)
    try:
        with local_stack(config, console) as stack:
            _print_banner(console, config, stack)
            if on_ready is not None:
                on_ready(stack.address)
            _watch(stack)
    except KeyboardInterrupt:
        console.print("stopped")
    except (StackFailedError, OSError, ValueError, ServiceError) as error:
        raise SystemExit(f"quire serve: {error}") from error


@contextmanager
def local_stack(config: LocalStackConfig, console: Console | None = None) -> Iterator[RunningStack]:
    """Start everything, yield when the router answers, and end it in the order router, workers, Redis.

    Raises:
        StackFailedError: a process ended before it was ready.
    """
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(console))
        router_redis = worker_redis = config.redis_url
        if config.redis_url is None:
            redis = stack.enter_context(RedisProcess())
            router_redis, worker_redis = redis.router_url, redis.worker_url
        secret = os.environ.get("QUIRE_CLUSTER_SECRET", "").encode() or secrets.token_bytes(32)
        configs = worker_configs(config, worker_redis, secret)
        workers = stack.enter_context(_children(run_worker, configs, config.stop_seconds))
        router_config = replace(config.router, redis_url=router_redis, cluster_secret=secret)
        routers = {"router": (router_config, config.log_level)}
        router = stack.enter_context(_children(_run_router, routers, config.stop_seconds))["router"]
        ready: dict[str, RunningWorker] = {}
        addresses = RouterAddresses("", None, "")
        for name, report in _reports([router, *workers.values()], progress):
            if isinstance(report, RunningWorker):
                ready[name] = report
            else:
                addresses = report
        progress.stop()
        _wait_until_joined(addresses.admin, config)
        yield RunningStack(addresses.grpc, addresses.admin, addresses.http, router, workers, ready)


# --- processes ----------------------------------------------------------------------------------------------


def worker_configs(config: LocalStackConfig, redis_url: str | None, secret: bytes) -> dict[str, WorkerConfig]:
    """Return each worker's configuration by its name."""
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
            # The router ends too: there is nobody to notice.
            notice_seconds=0.0,
            log_level=config.log_level,
        )
    return configs


def divide_processors(cpus: list[int], num_workers: int) -> list[list[int]]:
    """Give each worker processors of its own; with fewer processors than workers, one each in turn."""
    if len(cpus) < num_workers:
        return [[cpus[index % len(cpus)]] for index in range(num_workers)]
    return [cpus[index::num_workers] for index in range(num_workers)]


@contextmanager
def _children(
    target: Callable[..., None], arguments: Mapping[str, object], stop_seconds: float
) -> Iterator[dict[str, Child]]:
    """Run ``target(argument, on_ready)`` in processes; on exit stop them, by force if they do not listen."""
    children = {name: _start(name, target, argument) for name, argument in arguments.items()}
    try:
        yield children
    finally:
        for child in children.values():
            child.process.terminate()
        for child in children.values():
            child.process.join(stop_seconds)
            if child.process.is_alive():
                _log.warning("process_killed", name=child.name)
                child.process.kill()
                child.process.join()
            child.pipe.close()


def _start(name: str, target: Callable[..., None], argument: object) -> Child:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child_main, args=(target, argument, sender), name=name)
    process.start()
    sender.close()
    return Child(name, process, receiver)


def _child_main(target: Callable[..., None], argument: object, pipe: Connection) -> None:
    # Ctrl-C reaches the terminal's whole group, but the stack ends its processes in order.
    os.setsid()
    end_with_parent()
    try:
        target(argument, partial(_report_ready, pipe))
    except (ServiceError, OSError, ValueError, RuntimeError) as error:
        pipe.send(
            error if isinstance(error, ServiceError) else RuntimeError(f"{type(error).__name__}: {error}")
        )
        sys.exit(1)


def _report_ready(pipe: Connection, running: RunningWorker | RunningRouter) -> None:
    pipe.send(running if isinstance(running, RunningWorker) else running.addresses)


def _run_router(argument: tuple[RouterConfig, str], on_ready: Callable[[RunningRouter], None]) -> None:
    config, log_level = argument
    configure_logging(log_level, process="router")
    asyncio.run(run_router(config, on_ready))


def _reports(
    children: list[Child], progress: Progress
) -> Iterator[tuple[str, RunningWorker | RouterAddresses]]:
    """Yield what each child reports when it is ready; raise if one ends before."""
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
    """Return when the router has met every worker, so that the first request finds the whole stack."""
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
    """Wait while there is a router and a decode worker; report what ends."""
    alive = {child.process.sentinel: child for child in (stack.router, *stack.workers.values())}
    while True:
        for sentinel in wait(list(alive)):
            child = alive.pop(sentinel)  # type: ignore[arg-type]
            _log.error("process_ended", name=child.name, exit_code=child.process.exitcode)
            has_decode = any(c.name.startswith("decode") for c in alive.values())
            if child is stack.router or not has_decode:
                raise StackFailedError(f"{child.name} ended with exit code {child.process.exitcode}")


# --- what one sees ------------------------------------------------------------------------------------------


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


def _raise_keyboard_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
