"""Connects this process to a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from quire.rpc.server import STOP_SIGNALS
from quire.services.launch.launcher import LaunchError

CONNECT_SECONDS = 5.0
LOCAL = "local"
"""Instead of an address: start a Ray cluster of only this machine, which ends with this process."""


@contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect to a cluster, yield the address of this machine in it, and leave it.

    Args:
        address: host:port of the cluster's head; "auto": the cluster of which this machine is a node;
            "local": start one.

    Raises:
        LaunchError: there is no such cluster, or this machine is not one of its nodes.
    """
    # Ray would report its use to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default actors give way to all other processes of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    settings: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        _check_port(address)
        ray.init(address=address, logging_level=logging.ERROR, **settings)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"no Ray cluster at {address}, of which this machine is a node ({_first_line(error)}): start it "
            "with `ray start --head`, join it with `ray start --address=HOST:PORT`, or give --ray local"
        ) from error
    # Ray has replaced them by its own, which end the process immediately.
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield node_address()
    finally:
        ray.shutdown()


def _check_port(address: str) -> None:
    """Raise OSError if nothing listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def node_address() -> str:
    """Return the address of the node on which this process runs, as the node's owner has named it."""
    here = ray.get_runtime_context().get_node_id()
    [address] = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here]
    return address


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
