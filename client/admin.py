"""The client of a router's admin port, for operators' programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import grpc
from google.protobuf.message import Message

from quire.client.channel import channel_options
from quire.client.conversion import values_of
from quire.client.errors import invalid_request, typed_errors
from quire.client.router_client import LONGEST_SECONDS
from quire.protos import admin_pb2 as pb
from quire.protos.admin_pb2_grpc import AdminServiceStub

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_LEVELS = {
    "debug": pb.LOG_LEVEL_DEBUG,
    "info": pb.LOG_LEVEL_INFO,
    "warning": pb.LOG_LEVEL_WARNING,
    "error": pb.LOG_LEVEL_ERROR,
}


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's requests and KV blocks, as the worker reports them."""

    num_running: int
    num_waiting: int
    num_transferring: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as the router sees it."""

    worker_id: str
    role: Literal["prefill", "decode"]
    address: str
    is_draining: bool
    num_requests: int
    """Number of requests of this router on the worker."""
    load: WorkerLoad | None
    """None if the worker does not answer."""
    model: str
    metrics_address: str
    """host:port of its metrics; empty if the worker does not report it."""
    revision: str
    """Prefill and decode workers of one revision work together."""
    is_waiting: bool
    """Whether it gets no new requests only because its revision lacks a worker of the other role."""

    @property
    def state(self) -> Literal["serving", "waiting", "draining", "silent"]:
        """Its state in a word; silent: it does not answer."""
        if self.load is None:
            return "silent"
        return "draining" if self.is_draining else "waiting" if self.is_waiting else "serving"


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What a tenant has asked of the router."""

    name: str
    """Empty for the only tenant of a router without API keys."""
    num_requests: int
    """Number of requests that have been admitted and have not finished."""
    num_waiting: int
    """Of these, requests that wait for a place within the tenant's limit."""
    num_tokens: int
    """Tokens of its prompts and answers since the router started."""


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """What a router knows."""

    workers: tuple[WorkerStatus, ...]
    tenants: tuple[TenantStatus, ...]
    metrics_address: str
    """host:port of the router's own metrics."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """What a change of the number of workers did, by the workers' names."""

    started: list[str]
    left: list[str]


class AdminClient:
    """Calls a router's admin port; each method raises ``QuireError`` if the call fails."""

    def __init__(self, address: str = "127.0.0.1:8503", *, timeout: float = 10.0) -> None:
        self._timeout = timeout
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self._stub = AdminServiceStub(self._channel)

    def workers(self) -> list[WorkerStatus]:
        """Return all workers that the router knows, including draining ones."""
        return list(self.status().workers)

    def status(self) -> RouterStatus:
        """Return the workers that the router knows, and the tenants that have sent it requests."""
        response = self._call(self._stub.ListWorkers, pb.ListWorkersRequest())
        tenants = tuple(TenantStatus(**values_of(TenantStatus, each)) for each in response.tenants)
        return RouterStatus(tuple(map(_to_status, response.workers)), tenants, response.metrics_address)

    def drain(self, worker_id: str, *, undo: bool = False) -> None:
        """Make all routers send no new requests to a worker; with ``undo``, use it again."""
        self._call(self._stub.DrainWorker, _request(pb.DrainWorkerRequest, worker_id=worker_id, undo=undo))

    def change_role(self, worker_id: str, role: Literal["prefill", "decode"]) -> None:
        """Change a worker's role; its cache and its running requests remain, and new ones follow the role."""
        request = _request(pb.ChangeWorkerRoleRequest, worker_id=worker_id, role=role)
        self._call(self._stub.ChangeWorkerRole, request)

    def scale(self, num_workers: Mapping[str, int], *, timeout: float = 600.0) -> Scaled:
        """Start or stop workers until each role has the given number.

        Returns when the new workers serve and the stopped ones have finished their requests.

        Args:
            num_workers: number of workers by role, "prefill" or "decode"; other roles do not change.
            timeout: seconds to wait; the change goes on afterwards.
        """
        request = _request(pb.ScaleWorkersRequest, num_workers=num_workers)
        response = self._call(self._stub.ScaleWorkers, request, timeout)
        return Scaled(list(response.started), list(response.left))

    def elastic_roles(self) -> str:
        """Return how the router sees the load of the roles, and what it changed last.

        Empty if the router does not change roles by itself.
        """
        return str(self._call(self._stub.ListWorkers, pb.ListWorkersRequest()).elastic_roles)

    def clear_caches(self, worker_ids: Sequence[str] = ()) -> Mapping[str, int]:
        """Make workers (by default all) forget cached blocks; return the number of blocks by worker."""
        request = _request(pb.ClearWorkerCachesRequest, worker_ids=worker_ids)
        return dict(self._call(self._stub.ClearWorkerCaches, request).num_blocks)

    def add_adapter(self, name: str, path: str, *, timeout: float = 600.0) -> str:
        """Load an adapter on every worker, or other weights under its name; return the weights' digest.

        Args:
            name: requests name it as their model.
            path: its folder on the workers' machines, or hub id.
            timeout: seconds to wait.
        """
        request = _request(pb.AddAdapterRequest, name=name, path=path)
        return str(self._call(self._stub.AddAdapter, request, timeout).digest)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter on every worker; the requests that use it go on."""
        self._call(self._stub.RemoveAdapter, _request(pb.RemoveAdapterRequest, name=name))

    def change_log_level(self, level: Literal["debug", "info", "warning", "error"]) -> list[str]:
        """Change the log level of the router and its workers; return the ids of the workers that did so."""
        request = pb.ChangeLogLevelRequest(level=_LEVELS[level])
        return list(self._call(self._stub.ChangeLogLevel, request).worker_ids)

    def _call(self, method: Callable[..., T], request: object, timeout: float | None = None) -> T:
        with typed_errors():
            seconds = self._timeout if timeout is None else timeout
            return method(request, timeout=min(LONGEST_SECONDS, seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()


def _request(kind: type[M], **values: Any) -> M:
    """Return a request with these values.

    Raises:
        InvalidRequest: a value does not fit its field.
    """
    request = kind()
    for name, value in values.items():
        try:
            request.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            raise invalid_request(name, f"{value!r:.80} does not fit: {error}") from error
    return request


def _to_status(status: pb.WorkerStatus) -> WorkerStatus:
    load = WorkerLoad(**values_of(WorkerLoad, status.load)) if status.HasField("load") else None
    return WorkerStatus(**{**values_of(WorkerStatus, status), "load": load})
