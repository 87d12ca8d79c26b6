"""Finds the address at which others reach a worker."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from quire.rpc.server import GrpcServer
from quire.services.worker.config import WILDCARDS, WorkerConfig

REDIS_PORT = 6379


def reachable_address(config: WorkerConfig, server: GrpcServer) -> str:
    """Return the host:port at which others reach the worker."""
    if config.advertise is not None:
        return config.advertise
    if config.redis_url is not None and config.host in WILDCARDS:
        return address_towards(config.redis_url, server.port)
    return server.address


def address_towards(redis_url: str, port: int) -> str:
    """Return ``port`` at the address from which this machine, or container, connects to Redis.

    Other workers use the same Redis, so they can reach that network. Nothing is sent.

    Raises:
        OSError: Redis' host name is not known, or no network leads there.
    """
    target = urlsplit(redis_url)
    host = target.hostname or "127.0.0.1"
    try:
        family, kind, _, _, destination = socket.getaddrinfo(
            host, target.port or REDIS_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(destination)
            own = probe.getsockname()[0]
    except OSError as error:
        raise OSError(
            f"cannot find the address of this machine that leads to Redis at {host} ({error}); "
            "name the one at which others reach this worker with --advertise host:port"
        ) from error
    return f"[{own}]:{port}" if family is socket.AF_INET6 else f"{own}:{port}"
