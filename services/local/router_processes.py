"""Runs several router processes on the same ports; the kernel distributes the connections among them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait

from quire.rpc.errors import ServiceError, cannot_listen
from quire.rpc.server import bind_problem, tell_log
from quire.services.launch.launcher import NotStarted, Started
from quire.services.local.child_processes import (
    KILL_SECONDS,
    ChildProcesses,
    stop_on_signals,
    stopped_at_end,
)
from quire.services.router.app import RouterAddresses, run_router
from quire.services.router.config import PORT_STEP, RouterConfig
from quire.services.server.log import configure_logging

RouterProcesses = ChildProcesses[RouterConfig]
"""Processes that run ``run_router_process``."""


def run_router_processes(config: RouterConfig) -> None:
    """Serve with several router processes until SIGTERM or Ctrl-C; restart each process that ends.

    Raises:
        OSError: a port is taken.
        ServiceError: the settings do not let a router start.
        SystemExit: a process could not start, or a second signal arrived.
    """
    configure_logging(config.log_level, process="routers")
    received = stop_on_signals()
    patience = config.grace_seconds + KILL_SECONDS
    try:
        with shared_ports(config) as shared, stopped_at_end(patience, tell_log) as running:
            routers: RouterProcesses = ChildProcesses(running, run_router_process)
            routers.start(router_configs(shared))
            _watch(routers)
    except KeyboardInterrupt:
        if len(received) > 1:
            raise SystemExit(128 + received[-1]) from None
    except (RuntimeError, ServiceError) as error:
        raise SystemExit(f"quire router: {error}") from error


def router_configs(config: RouterConfig) -> dict[str, RouterConfig]:
    """Return the configuration of each router process, by name; each has its own metrics and admin port."""
    number = config.num_processes
    if number == 1:
        return {"router": config}
    return {
        f"router-{index}": replace(
            config,
            metrics_port=config.metrics_port and config.metrics_port + PORT_STEP * index,
            admin_port=config.chosen_admin_port and config.chosen_admin_port + PORT_STEP * index,
        )
        for index in range(number)
    }


def on_the_same_ports(config: RouterConfig, addresses: RouterAddresses) -> RouterConfig:
    """Return the configuration that restarts a router on the ports that it has chosen."""
    return replace(
        config,
        port=_port(addresses.grpc),
        http_port=None if addresses.http is None else _port(addresses.http),
        admin_port=_port(addresses.admin),
    )


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextmanager
def shared_ports(config: RouterConfig) -> Iterator[RouterConfig]:
    """Reserve the public ports for several processes until the context ends; yield a configuration with them.

    Meanwhile only processes of the same user that ask to share the port can bind it.

    Raises:
        OSError: a port is taken.
    """
    if config.num_processes == 1:
        yield config
        return
    with _reserved(config.host, config.port) as port:
        if config.http_port is None:
            yield replace(config, port=port, admin_port=config.chosen_admin_port)
            return
        with _reserved(config.host, config.http_port) as http_port:
            yield replace(config, port=port, http_port=http_port, admin_port=config.chosen_admin_port)


@contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Reserve a port that others may share. The socket gets no connection, since it does not listen."""
    # Without SO_REUSEPORT, a port cannot be bound even if another service shares it.
    if (problem := bind_problem(host, port)) is not None:
        raise cannot_listen(host, port, problem) from problem
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            reserved.bind(address)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        yield reserved.getsockname()[1]


def run_router_process(config: RouterConfig, report: Callable[[object], None]) -> None:
    """Run one router in this process, and report its addresses once it serves."""
    configure_logging(config.log_level, process="router")
    asyncio.run(run_router(config, lambda running: report(running.addresses), report))


def _watch(routers: RouterProcesses) -> None:
    """Restart each process that ends.

    Raises:
        ServiceError: a process could not start, and no process has served before.
        BadFileError: the same, and a file is the reason.
        RuntimeError: the same, and the reason is another one.
    """
    has_served = False
    while True:
        wait(routers.waitables(), routers.seconds)
        for event in routers.events():
            has_served |= isinstance(event, Started)
            if isinstance(event, NotStarted) and not has_served:
                raise event.error
