"""Serves an operator's calls: list, drain, scale and clear workers, change roles, adapters and log level."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from prometheus_client import CollectorRegistry

from quire.protos import admin_pb2 as pb
from quire.protos import admin_pb2_grpc as pb_grpc
from quire.protos import worker_pb2
from quire.rpc.channels import NO_PROXY, ChannelClosedError, closed_channel_errors
from quire.rpc.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from quire.rpc.server import GrpcServer, Service, grpc_server
from quire.services.router.admin.roles import Roles
from quire.services.router.metrics.metrics import TenantCounts
from quire.services.router.workers.worker import CALL_SECONDS, Worker, load_of
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.log import EventLogger, set_level

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name

_log = EventLogger("admin")
Response = TypeVar("Response")


class AdminServicer(pb_grpc.AdminServiceServicer):
    """Serves ``AdminService`` over the workers that the router knows.

    Args:
        tenants: what each tenant has asked of the router, by name.
        metrics_address: host:port of the router's metrics.
        launcher_address: host:port of the process that scales workers; None: there is none.
    """

    def __init__(
        self,
        workers: WorkerSet,
        roles: Roles,
        tenants: Mapping[str, TenantCounts],
        metrics_address: str,
        launcher_address: str | None = None,
    ) -> None:
        self._workers = workers
        self._roles = roles
        self._tenants = tenants
        self._metrics_address = metrics_address
        self._launcher_address = launcher_address

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Any) -> pb.ListWorkersResponse:
        """Return the status of every worker and tenant; a worker that does not answer has no load."""
        workers = sorted(self._workers.all(), key=lambda worker: (worker.role, worker.worker_id))
        states = self._workers.states()
        statuses = [_status(worker, states[worker]) for worker in workers]
        tenants = [
            pb.TenantStatus(name=name, **asdict(counts)) for name, counts in sorted(self._tenants.items())
        ]
        return pb.ListWorkersResponse(
            workers=await asyncio.gather(*statuses),
            elastic_roles=self._roles.status(),
            metrics_address=self._metrics_address,
            tenants=tenants,
        )

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        """Start a worker's draining, or end it with ``undo``.

        On return this router has stopped sending the worker new requests, or has resumed. The worker notifies
        the other routers.
        """
        [worker] = self._find([request.worker_id])
        is_draining = not request.undo
        message = worker_pb2.SetDrainingRequest(is_draining=is_draining)
        tell = partial(_ask, worker, worker.stub.SetDraining, message)
        await self._workers.set_draining(worker, is_draining, tell)
        _log.info("worker_drained", worker=worker.worker_id, undo=request.undo)
        return pb.DrainWorkerResponse()

    async def ChangeWorkerRole(
        self, request: pb.ChangeWorkerRoleRequest, context: Any
    ) -> pb.ChangeWorkerRoleResponse:
        """Change a worker's role; on return this router places new requests by the new role.

        The worker notifies the other routers.
        """
        [worker] = self._find([request.worker_id])
        await self._roles.change(worker, request.role)
        _log.info("worker_role_set", worker=worker.worker_id, role=request.role)
        return pb.ChangeWorkerRoleResponse()

    async def ClearWorkerCaches(
        self, request: pb.ClearWorkerCachesRequest, context: Any
    ) -> pb.ClearWorkerCachesResponse:
        """Drop the cached blocks that no request uses, on the given workers or on all; return the counts."""
        workers = self._find(request.worker_ids)
        cleared = await asyncio.gather(
            *(_ask(worker, worker.stub.ClearCache, worker_pb2.ClearCacheRequest()) for worker in workers)
        )
        counts = {worker.worker_id: each.num_blocks for worker, each in zip(workers, cleared, strict=True)}
        _log.info("caches_cleared", workers=len(workers), blocks=sum(counts.values()))
        return pb.ClearWorkerCachesResponse(num_blocks=counts)

    async def ChangeLogLevel(
        self, request: pb.ChangeLogLevelRequest, context: Any
    ) -> pb.ChangeLogLevelResponse:
        """Change the log level of this router and of every worker that answers; return those workers' ids."""
        set_level(request.level)
        workers = self._workers.all()
        level = worker_pb2.SetLogLevelRequest(level=request.level)
        results = await asyncio.gather(
            *(_ask(worker, worker.stub.SetLogLevel, level) for worker in workers), return_exceptions=True
        )
        changed = [w.worker_id for w, r in zip(workers, results, strict=True) if not isinstance(r, Exception)]
        return pb.ChangeLogLevelResponse(worker_ids=sorted(changed))

    async def ScaleWorkers(self, request: pb.ScaleWorkersRequest, context: Any) -> pb.ScaleWorkersResponse:
        """Ask the process that started this router to start or end workers; return their ids."""
        if self._launcher_address is None:
            raise FailedPrecondition(
                "this router cannot start workers, since `quire serve` has not started it: "
                "you start and stop `quire prefill` and `quire decode` yourself",
                reason="NO_LAUNCHER",
            )
        try:
            opened = grpc.aio.insecure_channel(self._launcher_address, options=[NO_PROXY])
            async with opened as channel:
                launcher = pb_grpc.AdminServiceStub(channel)
                response: pb.ScaleWorkersResponse = await launcher.ScaleWorkers(
                    request, timeout=context.time_remaining()
                )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise FailedPrecondition(error.details() or "", reason="NOT_SCALED") from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded("the change takes longer than the call may; it goes on") from error
            problem = f"`quire serve` did not scale: {error.details()}"
            raise Unavailable(problem, reason="NO_LAUNCHER") from error
        _log.info("workers_scaled", started=len(response.started), left=len(response.left))
        return response

    async def AddAdapter(self, request: pb.AddAdapterRequest, context: Any) -> pb.AddAdapterResponse:
        """Load an adapter on every worker; on return, requests to this router may name it."""
        message = worker_pb2.LoadAdapterRequest(name=request.name, path=request.path)
        workers = self._workers.all()
        seconds = context.time_remaining()
        loaded = await asyncio.gather(
            *(_ask(worker, worker.stub.LoadAdapter, message, seconds) for worker in workers)
        )
        for worker, each in zip(workers, loaded, strict=True):
            worker.adapters[request.name] = each.digest
        digests = {each.digest for each in loaded}
        if len(digests) != 1:
            problem = (
                "workers have read different weights from this path" if digests else "there is no worker"
            )
            raise FailedPrecondition(f"{problem}; no request may name the adapter", reason="BAD_ADAPTER")
        _log.info("adapter_added", adapter=request.name, digest=min(digests), workers=len(workers))
        return pb.AddAdapterResponse(digest=min(digests))

    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, context: Any) -> pb.RemoveAdapterResponse:
        """Unload an adapter on every worker that has it; requests that use it continue with it."""
        workers = [worker for worker in self._workers.all() if request.name in worker.adapters]
        if not workers:
            raise NotFound(f"no worker has an adapter {request.name!r}", reason="ADAPTER_NOT_FOUND")
        message = worker_pb2.UnloadAdapterRequest(name=request.name)
        await asyncio.gather(*(_ask(worker, worker.stub.UnloadAdapter, message) for worker in workers))
        for worker in workers:
            worker.adapters.pop(request.name, None)
        _log.info("adapter_removed", adapter=request.name, workers=len(workers))
        return pb.RemoveAdapterResponse()

    def _find(self, worker_ids: Sequence[str]) -> list[Worker]:
        known = {worker.worker_id: worker for worker in self._workers.all()}
        for worker_id in worker_ids:
            if worker_id not in known:
                raise NotFound(
                    f"no worker {worker_id!r}; there are: {', '.join(sorted(known)) or 'none'}",
                    reason="WORKER_NOT_FOUND",
                )
        return [known[worker_id] for worker_id in worker_ids] if worker_ids else list(known.values())


@asynccontextmanager
async def admin_server(
    workers: WorkerSet,
    roles: Roles,
    tenants: Mapping[str, TenantCounts],
    metrics_address: str,
    port: int,
    launcher_address: str | None,
) -> AsyncIterator[GrpcServer]:
    """Serve the admin calls on the loopback until the context ends.

    Raises:
        OSError: the port cannot be bound.
    """
    servicer = AdminServicer(workers, roles, tenants, metrics_address, launcher_address)
    service = Service(pb_grpc.add_AdminServiceServicer_to_server, servicer, SERVICE_NAME)
    async with grpc_server([service], host="127.0.0.1", port=port, registry=CollectorRegistry()) as server:
        await server.ready()
        yield server


def _metrics_address(worker: Worker) -> str:
    host, port = worker.address.rpartition(":")[0], worker.info.metrics_port
    return f"{host}:{port}" if port else ""


async def _status(worker: Worker, state: str) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker_id=worker.worker_id,
        role=worker.role,
        address=worker.address,
        is_draining=worker.health.is_draining,
        num_requests=worker.num_requests,
        load=await _load(worker),
        model=worker.info.model,
        metrics_address=_metrics_address(worker),
        revision=worker.revision,
        is_waiting=state == "waiting",
    )


async def _load(worker: Worker) -> pb.WorkerLoad | None:
    if (load := await load_of(worker, CALL_SECONDS)) is None:
        return None
    return pb.WorkerLoad(**{name: getattr(load, name) for name in pb.WorkerLoad.DESCRIPTOR.fields_by_name})


_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
"""Codes with which a worker refuses a call that it would refuse again."""


async def _ask(
    worker: Worker,
    method: Callable[..., Awaitable[Response]],
    request: object,
    seconds: float | None = CALL_SECONDS,
) -> Response:
    try:
        with closed_channel_errors():
            return await method(request, timeout=seconds)
    except ChannelClosedError as error:
        raise Unavailable(f"worker {worker.worker_id} has left", reason="WORKER_FAILED") from error
    except grpc.aio.AioRpcError as error:
        raise (FailedPrecondition if error.code() in _REFUSALS else Unavailable)(
            f"worker {worker.worker_id} did not do it: {error.code().name}: {error.details()}",
            reason="WORKER_FAILED",
        ) from error
