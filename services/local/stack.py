"""Runs a router, workers and Redis for ``quire serve``; by default all of them on this machine."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait

import grpc.aio
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quire.engine.runner.processors import read_cores, share_of_quota
from quire.engine.weights.weights_file import WeightsFile
from quire.kvindex.index import UNREACHABLE
from quire.kvindex.redis_index import redis_version
from quire.protos.admin_pb2 import DrainWorkerRequest, ListWorkersRequest
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.rpc.channels import NO_PROXY
from quire.rpc.errors import ServiceError
from quire.rpc.proof import Caller, Peer
from quire.rpc.server import Draining, bind_problem
from quire.services.launch.launcher import (
    RESTART_SECONDS,
    Event,
    Launcher,
    LaunchError,
    NotStarted,
    Started,
    Waitable,
)
from quire.services.launch.scaling import ScaleServer, scale
from quire.services.local.child_processes import (
    KILL_SECONDS,
    Child,
    ChildProcesses,
    has_gpu_driver,
    signals_held_back,
    stop_on_signals,
    stopped_at_end,
)
from quire.services.local.config import LocalStackConfig
from quire.services.local.local_launcher import LocalLauncher, local_launcher
from quire.services.local.places import Place, numbers_by_node
from quire.services.local.redis_process import RedisNotStartedError, RedisProcess
from quire.services.local.router_processes import (
    RouterProcesses,
    on_the_same_ports,
    router_configs,
    run_router_process,
    shared_ports,
)
from quire.services.local.weights_column import WeightsColumn
from quire.services.requests.served_model import check_text_files
from quire.services.router.app import RouterAddresses
from quire.services.server.log import EventLogger, configure_logging
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.settings.setting import MAX_PORT

JOIN_SECONDS = 30.0
JOIN_POLL_SECONDS = 0.05
DRAIN_SECONDS = 5.0
REDIS_SECONDS = 2.0

_log = EventLogger("stack")

OpenLauncher = Callable[[LocalStackConfig, Callable[[Draining], None]], AbstractContextManager[Launcher]]
"""Function that opens the launcher of a stack. Its workers end with the context."""


@dataclass
class RunningStack:
    """A stack: router processes of this machine, and the workers of a launcher.

    Attributes:
        make_worker: returns the configuration of a worker by its name.
        caller: signs calls to the workers.
        ready: what each worker reported at its latest start.
        addresses: the addresses of each router process.
        redis: the stack's own Redis; None if it uses another one.
    """

    config: LocalStackConfig
    router_processes: RouterProcesses
    launcher: Launcher
    make_worker: Callable[[str], WorkerConfig]
    caller: Caller
    ready: dict[str, RunningWorker] = field(default_factory=dict)
    addresses: dict[str, RouterAddresses] = field(default_factory=dict)
    redis: RedisProcess | None = None

    @property
    def routers(self) -> dict[str, Child]:
        """The router processes."""
        return self.router_processes.running

    @property
    def workers(self) -> dict[str, Child]:
        """The workers' processes on this machine."""
        return self.launcher.running if isinstance(self.launcher, LocalLauncher) else {}

    @property
    def places(self) -> Mapping[str, Place]:
        """The processors of the workers on this machine."""
        return self.launcher.places if isinstance(self.launcher, LocalLauncher) else {}

    @property
    def address(self) -> str:
        """Address (host:port) of the public gRPC API."""
        return self._first.grpc

    @property
    def http_address(self) -> str | None:
        """Address (host:port) of the HTTP API."""
        return self._first.http

    @property
    def admin_address(self) -> str:
        """Address (host:port) of the first router's admin port."""
        return self._first.admin

    @property
    def _first(self) -> RouterAddresses:
        return self.addresses[min(self.addresses)]

    def peer(self, name: str, channel: grpc.aio.Channel) -> Peer:
        """Return a peer, which signs calls over ``channel``, for the stubs of a worker."""
        worker = self.ready[name]
        return Peer(channel, self.caller, worker.address, worker.epoch)

    def wait(self, *more: Waitable) -> list[Event]:
        """Wait for events or until one of ``more`` is ready; restart processes that have ended."""
        times = [each for each in (self.router_processes.seconds, self.launcher.seconds) if each is not None]
        everything = [*self.router_processes.waitables(), *self.launcher.waitables(), *more]
        if self.redis is not None:
            sentinel = self.redis.sentinel
            if sentinel is None:
                times.append(RESTART_SECONDS)
            else:
                everything.append(sentinel)
        wait(everything, min(times, default=None))
        self._watch_redis()
        happened = [*self.router_processes.events(), *self.launcher.events()]
        for event in happened:
            if isinstance(event, Started):
                self._note_start(event)
        return happened

    def _watch_redis(self) -> None:
        """Start Redis again if it has ended; workers then join it again by themselves."""
        try:
            if self.redis is not None and self.redis.start_again():
                _log.error("process_started_again", name="redis")
        except RedisNotStartedError as error:
            _log.error("process_not_started", name="redis", error=str(error))

    def _note_start(self, event: Started) -> None:
        name, report = event
        if isinstance(report, RunningWorker):
            self.ready[name] = report
            return
        self.addresses[name] = report
        # Restart the router at the same address, so that clients find it.
        again = on_the_same_ports(router_configs(self.config.router)[name], report)
        self.router_processes.start_again_with(name, again)


def run(
    config: LocalStackConfig,
    on_ready: Callable[[str], None] | None = None,
    open_launcher: OpenLauncher = local_launcher,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Running requests may end within the router's grace period. A second signal ends all processes at once.

    Args:
        on_ready: called with the router's address once the stack can answer requests.

    Raises:
        SystemExit: the stack could not start, or a second signal arrived.
    """
    configure_logging(config.log_level, process="stack")
    console = Console(stderr=True)
    received = stop_on_signals()
    try:
        with signals_held_back():  # the server's threads inherit this and keep the signals blocked
            scaling = ScaleServer()
        config = replace(config, router=replace(config.router, launcher_address=scaling.address))
        with local_stack(config, console, open_launcher) as stack:
            _print_banner(console, config, stack)
            if on_ready is not None:
                on_ready(stack.address)
            _follow(stack, scaling)
    except KeyboardInterrupt:
        if len(received) > 1:
            raise SystemExit(128 + received[-1]) from None
        console.print("stopped")
    except (LaunchError, OSError, ValueError, ServiceError) as error:
        raise SystemExit(f"quire serve: {error}") from error


@contextmanager
def local_stack(
    config: LocalStackConfig,
    console: Console | None = None,
    open_launcher: OpenLauncher = local_launcher,
) -> Iterator[RunningStack]:
    """Start all processes; yield when the router answers; stop them in the order router, workers, Redis.

    Raises:
        LaunchError: a process ended before it was ready.
        BadFileError: the tokenizer or another text file of the model is missing or damaged.
    """
    check_text_files(config.router.model or config.worker.model_path, config.router.generation_config)
    with ExitStack() as stack:
        show = partial(_show_drain, console)
        # Redis starts first and ends last; its address depends on where the workers run.
        redis = stack.enter_context(ExitStack())
        launcher = stack.enter_context(open_launcher(config, show))
        router_redis = worker_redis = config.redis_url
        process = None
        if config.redis_url is not None and console is not None:
            _warn_of_redis(config.redis_url, console)
        if config.redis_url is None:
            process = redis.enter_context(RedisProcess(host=launcher.host))
            router_redis, worker_redis = process.router_url, process.worker_url
        secret = os.environ.get("QUIRE_CLUSTER_SECRET", "").encode() or secrets.token_bytes(32)
        router = replace(
            config.router, redis_url=router_redis, cluster_secret=secret, log_level=config.log_level
        )
        config = replace(config, router=stack.enter_context(shared_ports(router)))
        routers = stack.enter_context(stopped_at_end(config.router.grace_seconds + KILL_SECONDS, show))
        running = RunningStack(
            config,
            ChildProcesses(routers, run_router_process),
            launcher,
            WorkerConfigs(config, worker_redis, secret),
            Caller(secret),
            redis=process,
        )
        running.router_processes.start(router_configs(config.router))
        launcher.start(worker_configs(config, running.make_worker))
        # Start the progress bar only now: its thread would receive the signals that are blocked while
        # processes start.
        files = launcher.weights_files.values() if isinstance(launcher, LocalLauncher) else ()
        with _progress(console, files) as progress:
            _wait_until_started(running, progress)
        for addresses in running.addresses.values():
            _wait_until_joined(addresses.admin, launcher.names)
        yield running


# --- processes ----------------------------------------------------------------------------------------------


class WorkerConfigs:
    """Makes the configurations of a stack's workers; each has a metrics port after the router's."""

    def __init__(self, config: LocalStackConfig, redis_url: str | None, secret: bytes) -> None:
        self._config = config
        self._redis_url = redis_url
        self._secret = secret
        self._metrics_ports: dict[str, int] = {}
        taken = {*config.router.ports.values()}
        self._free_ports = (
            port
            for port in range(config.router.metrics_port + 1, MAX_PORT + 1)
            if port not in taken and bind_problem(config.worker.host, port) is None
        )

    def __call__(self, name: str) -> WorkerConfig:
        """Return the configuration of the worker with a name such as decode-0."""
        config, worker = self._config, self._config.worker
        if config.router.metrics_port and name not in self._metrics_ports:
            port = next(self._free_ports, None)
            if port is None:
                raise LaunchError(f"there is no free port above --metrics-port for the metrics of {name}")
            self._metrics_ports[name] = port
        return replace(
            worker,
            role="prefill" if name.startswith("prefill-") else "decode",
            worker_id=name,
            redis_url=self._redis_url,
            cluster_secret=self._secret,
            metrics_port=self._metrics_ports.get(name, 0),
            disk_cache=worker.disk_cache and worker.disk_cache.of(name),
            # Before a worker is stopped, a router drains it, or the router ends at the same time.
            notice_seconds=0.0,
            log_level=config.log_level,
        )


def worker_configs(config: LocalStackConfig, make: Callable[[str], WorkerConfig]) -> dict[str, WorkerConfig]:
    """Return the configuration of each worker that a stack begins with, by name."""
    names = [
        f"{role}-{index}" for role, number in numbers_of_workers(config).items() for index in range(number)
    ]
    return {name: make(name) for name in names}


def numbers_of_workers(config: LocalStackConfig) -> dict[str, int]:
    """Return the number of workers of each role, by default as many as the machine suggests."""
    given = {"prefill": config.num_prefill, "decode": config.num_decode}
    if any(number is not None for number in given.values()) or config.ray is not None or has_gpu_driver():
        return {role: 1 if number is None else number for role, number in given.items()}
    return numbers_by_node(read_cores(os.sched_getaffinity(0)), share_of_quota(1, 0))


def _wait_until_started(stack: RunningStack, progress: Progress) -> None:
    """Wait until every router and worker serves.

    Raises:
        LaunchError: one could not start.
    """
    pending = [*stack.router_processes.names, *sorted(stack.launcher.names)]
    bar = progress.add_task("starting", total=len(pending), waiting="")
    while pending:
        progress.update(bar, waiting=", ".join(pending))
        for event in stack.wait():
            if isinstance(event, NotStarted):
                raise LaunchError(f"{event.name} did not start: {event.error}") from event.error
            if event.name in pending:
                pending.remove(event.name)
                progress.advance(bar)


def _wait_until_joined(admin_address: str, names: Collection[str]) -> None:
    """Wait until the router knows all of these workers, so that the first request can use the whole stack.

    Raises:
        LaunchError: a worker is still unknown after ``JOIN_SECONDS``.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    with grpc.insecure_channel(admin_address, options=[NO_PROXY]) as channel:
        stub = AdminServiceStub(channel)
        while True:
            known = stub.ListWorkers(ListWorkersRequest(), timeout=JOIN_SECONDS, wait_for_ready=True)
            if {*names} <= {each.worker_id for each in known.workers}:
                return
            if time.monotonic() > deadline:
                raise LaunchError(f"not all workers found the router within {JOIN_SECONDS:.0f} s")
            time.sleep(JOIN_POLL_SECONDS)


def _follow(stack: RunningStack, scaling: ScaleServer) -> None:
    """Restart processes that end, and scale when operators ask for it, until a signal arrives."""
    scale_stack = partial(scale, stack.launcher, stack.make_worker, partial(_drain, stack), stack.wait)
    with scaling:
        while True:
            stack.wait(scaling.calls.waitable)
            for call in scaling.calls.take():
                call.answer(scale_stack)


def _drain(stack: RunningStack, name: str) -> None:
    """Make the routers avoid a worker and move its answers, unless it has ended already."""
    opened = grpc.insecure_channel(stack.admin_address, options=[NO_PROXY])
    with opened as channel, suppress(grpc.RpcError):
        AdminServiceStub(channel).DrainWorker(DrainWorkerRequest(worker_id=name), timeout=DRAIN_SECONDS)


# --- output on the terminal ---------------------------------------------------------------------------------


def _progress(console: Console | None, files: Collection[WeightsFile]) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[waiting]}"),
        WeightsColumn(files),
        console=console or Console(stderr=True, quiet=True),
        transient=True,
    )


def _warn_of_redis(url: str, console: Console) -> None:
    """If an operator's Redis does not answer, print that the stack waits for it."""
    try:
        redis_version(url, REDIS_SECONDS)
    except UNREACHABLE as error:
        where = url.rpartition("@")[2]
        console.print(f"waiting for Redis, which does not answer at {where}: {error}", soft_wrap=True)


def _print_banner(console: Console, config: LocalStackConfig, stack: RunningStack) -> None:
    some = next(iter(stack.ready.values()))
    show = partial(console.print, soft_wrap=True)
    has_tls, has_keys = config.router.public_tls is not None, config.router.api_keys_file is not None
    kind = "gRPC" + ", TLS" * has_tls + ", API keys" * has_keys
    show(f"[bold]quire[/bold] serves [bold]{some.model}[/bold] at {stack.address} ({kind})")
    if stack.http_address is not None:
        scheme = "https" if has_tls else "http"
        show(f"  http       {scheme}://{stack.http_address}/v1 (OpenAI)")
        show(f"  page       {scheme}://{stack.http_address}/")
    for name, worker in sorted(stack.ready.items()):
        capacity = worker.num_blocks * config.worker.block_size
        place = stack.places.get(name)
        where = "" if place is None else f", {place.description(config.worker.threads)}"
        show(
            f"  {name:<10} {worker.address}  {worker.num_blocks} blocks = {capacity} tokens of KV, "
            f"metrics at :{worker.metrics_port}{where}"
        )
    show(f"  admin      {stack.admin_address}")
    redis = (
        f"{stack.launcher.host}, private" if config.redis_url is None else config.redis_url.rpartition("@")[2]
    )
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
