"""The servers of the router's public APIs, gRPC and HTTP."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc.call_limits import CALL_MARGIN_SECONDS
from quire.rpc.server import PUBLIC_MESSAGE_BYTES, GrpcServer, Service, grpc_server
from quire.rpc.tls import server_context, server_credentials
from quire.services.router.config import RouterConfig
from quire.services.router.grpc.request_memory import RequestMemory
from quire.services.router.grpc.servicer import SERVICE_NAME, GenerationServicer
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.tenants.api_keys import Authenticator, RequireTenant

if TYPE_CHECKING:
    from quire.services.router.http.server import HttpServer


def has_http() -> bool:
    """Return whether the extra ``http``, which the HTTP API needs, is installed."""
    return all(map(find_spec, ("aiohttp", "pydantic")))


def public_grpc_server(
    config: RouterConfig,
    servicer: GenerationServicer,
    metrics: RouterMetrics,
    memory: RequestMemory,
    authenticator: Authenticator,
) -> AbstractAsyncContextManager[GrpcServer]:
    """Return the server of the public gRPC service."""
    return grpc_server(
        [Service(pb_grpc.add_GenerationServiceServicer_to_server, servicer, SERVICE_NAME)],
        host=config.host,
        port=config.port,
        max_message_bytes=PUBLIC_MESSAGE_BYTES,
        registry=metrics.registry,
        grace_seconds=config.grace_seconds,
        credentials=None if config.public_tls is None else server_credentials(config.public_tls),
        interceptors=[RequireTenant(authenticator)],
        call_seconds=config.request_timeout_seconds + CALL_MARGIN_SECONDS,
        memory=memory.request,
        checks_parts=True,
        shares_port=config.num_processes > 1,
    )


def public_http_server(
    config: RouterConfig, servicer: GenerationServicer, metrics: RouterMetrics, memory: RequestMemory
) -> AbstractAsyncContextManager[HttpServer]:
    """Return the server of the HTTP API.

    Raises:
        OSError: the extra ``http`` is not installed.
    """
    if not has_http():
        raise OSError(
            "the HTTP API needs the extra 'http': in quire's clone, run .venv/bin/pip install -e '.[http]'"
        )
    # Imported late, because a router that serves only gRPC does not need the extra.
    from quire.services.router.http.server import http_server

    return http_server(
        servicer,
        metrics.registry,
        memory,
        host=config.host,
        port=config.http_port or 0,
        tls=None if config.public_tls is None else server_context(config.public_tls),
        times=config.http_times,
        request_timeout_seconds=config.request_timeout_seconds,
        shares_port=config.num_processes > 1,
    )
