"""Runs the router, the workers and Redis as processes on this machine, for ``quire serve``."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Literal, NamedTuple

import grpc
import grpc.aio
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quire.kvtransfer.proof import Caller, Peer
from quire.protos.admin_pb2 import ListWorkersRequest
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.services.local.config import LocalStackConfig
from quire.services.local.redis_process import RedisProcess, end_with_parent
from quire.services.router.app import RouterAddresses, run_router
from quire.services.router.config import RouterConfig
from quire.services.server.errors import BadFileError, ServiceError
from quire.services.server.grpc_server import STOP_SIGNALS, Draining
from quire.services.server.log import configure_logging, get_logger
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.services.worker_process import run_worker

JOIN_SECONDS = 30.0
JOIN_POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""Time after its grace period in which a process has to end before it is killed."""

_log = get_logger("stack")


class StackFailedError(RuntimeError):
    """A process of the stack ended unexpectedly; its log says why."""


class Child(NamedTuple):
    """A started process and the pipe on which it reports that it is ready."""

    name: str
    process: SpawnProcess
    pipe: Connection


class RunningStack(NamedTuple):
    """A started stack whose router answers."""

    address: str
    admin_address: str
    http_address: str | None
    router: Child
    workers: dict[str, Child]
    ready: dict[str, RunningWorker]
    caller: Caller
    """Signs calls to the workers."""

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
    received = _stop_on_signals()
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
    with ExitStack() as stack:
        router_redis = worker_redis = config.redis_url
        if config.redis_url is None:
            redis = stack.enter_context(RedisProcess())
            router_redis, worker_redis = redis.router_url, redis.worker_url
        secret = os.environ.get("QUIRE_CLUSTER_SECRET", "").encode() or secrets.token_bytes(32)
        configs = worker_configs(config, worker_redis, secret)
        show = partial(_show_drain, console)
        patience = config.worker.grace_seconds + KILL_SECONDS
        workers = stack.enter_context(_children(run_worker, configs, patience, show))
        router_config = replace(config.router, redis_url=router_redis, cluster_secret=secret)
        routers = {"router": (router_config, config.log_level)}
        patience = config.router.grace_seconds + KILL_SECONDS
        router = stack.enter_context(_children(_run_router, routers, patience, show))["router"]
        # Start the progress bar only now: its thread would receive the signals that are blocked while
        # processes start.
        progress = stack.enter_context(_progress(console))
        ready: dict[str, RunningWorker] = {}
        addresses = RouterAddresses("", None, "")
        for name, report in _reports([router, *workers.values()], progress):
            if isinstance(report, RunningWorker):
                ready[name] = report
            else:
                addresses = report
        progress.stop()
        _wait_until_joined(addresses.admin, config)
        caller = Caller(secret)
        yield RunningStack(addresses.grpc, addresses.admin, addresses.http, router, workers, ready, caller)


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


@contextmanager
def _children(
    target: Callable[..., None],
    arguments: Mapping[str, object],
    stop_seconds: float,
    show: Callable[[Draining], None],
) -> Iterator[dict[str, Child]]:
    """Run ``target(argument, report)`` in processes; on exit stop them.

    Args:
        arguments: the argument for each process, by the process's name.
        stop_seconds: time for the processes to stop before they are killed.
        show: called with the reports of a stopping process about the requests that it waits for.
    """
    children: dict[str, Child] = {}
    try:
        for name, argument in arguments.items():
            with _signals_held_back():
                children[name] = _start(name, target, argument)
        yield children
    finally:
        for child in children.values():
            child.process.terminate()
        deadline = time.monotonic() + stop_seconds
        try:
            for child in children.values():
                _await_end(child, deadline, show)
        finally:
            for child in children.values():
                child.process.kill()
                child.process.join()
                child.pipe.close()


def _await_end(child: Child, deadline: float, show: Callable[[Draining], None]) -> None:
    """Return when a process has ended or the deadline has passed; show its reports meanwhile."""
    ends: list[Connection | int] = [child.pipe, child.process.sentinel]
    while child.process.sentinel not in (ready := wait(ends, max(0.0, deadline - time.monotonic()))):
        if not ready:
            _log.warning("process_killed", name=child.name)
            return
        try:
            report = child.pipe.recv()
        except (EOFError, OSError):
            ends.remove(child.pipe)
            continue
        if isinstance(report, Draining):
            show(report)


def _start(name: str, target: Callable[..., None], argument: object) -> Child:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child_main, args=(target, argument, sender), name=name)
    process.start()
    sender.close()
    return Child(name, process, receiver)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block the stop signals while a process starts.

    A signal then arrives only after the process is complete and recorded, and Ctrl-C only after the process
    is in a group of its own.
    """
    # Start the resource tracker first, because its start would unblock the signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child_main(target: Callable[..., None], argument: object, pipe: Connection) -> None:
    # Ctrl-C reaches all processes in the terminal's group, but the stack has to end its processes in order.
    os.setsid()
    # Ignore a SIGINT that was blocked during the start; the stack sends its own SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent()
    try:
        target(argument, partial(_report, pipe))
    except (ServiceError, OSError, ValueError, RuntimeError) as error:
        is_told = isinstance(error, ServiceError | BadFileError)
        _report(pipe, error if is_told else RuntimeError(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _report(pipe: Connection, report: object) -> None:
    # If the parent has died, the report is lost, and the death signal ends this process.
    with suppress(OSError):
        pipe.send(report)


def _run_router(argument: tuple[RouterConfig, str], report: Callable[[object], None]) -> None:
    config, log_level = argument
    configure_logging(log_level, process="router")
    asyncio.run(run_router(config, lambda running: report(running.addresses), report))


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
    """Wait as long as the router and at least one decode worker run; log each process that ends.

    Raises:
        StackFailedError: the router or the last decode worker ended.
    """
    alive = {child.process.sentinel: child for child in (stack.router, *stack.workers.values())}
    while True:
        for sentinel in wait(list(alive)):
            child = alive.pop(sentinel)  # type: ignore[arg-type]
            end = _end(child.process)
            _log.error("process_ended", name=child.name, end=end)
            has_decode = any(c.name.startswith("decode") for c in alive.values())
            if child is stack.router or not has_decode:
                raise StackFailedError(f"{child.name} {end}")


def _end(process: SpawnProcess) -> str:
    """Return a description of how a process ended."""
    # The process's sentinel, a pipe, closes shortly before its exit status is available.
    process.join()
    code = process.exitcode
    assert code is not None
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


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


def _stop_on_signals() -> list[int]:
    """Let the first SIGINT or SIGTERM raise KeyboardInterrupt, and the next kill all processes of the stack.

    SIGINT is handled even if it was ignored before, as in the background of a script. Returns a list to which
    the numbers of received signals are added.
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt
        for process in multiprocessing.active_children():
            process.kill()

    for each in STOP_SIGNALS:
        signal.signal(each, handle)
    return received
