"""Changes the roles of workers: for an operator, and by itself with ``--elastic-roles``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.kvindex.worker_record import ROLES
from quire.protos import worker_pb2
from quire.routing.demand import RoleState, Totals
from quire.routing.elastic_roles import CAUSES, ElasticRoles, RoleChange
from quire.routing.placement import Planner
from quire.routing.pressure import Pressure
from quire.rpc.channels import ChannelClosedError, closed_channel_errors
from quire.rpc.errors import FailedPrecondition, InvalidArgument, ServiceError, Unavailable
from quire.services.router.execution.cluster import Cluster
from quire.services.router.metrics.metrics import TokenTimes
from quire.services.router.workers.worker import CALL_SECONDS, Worker
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.log import EventLogger

DECISION_SECONDS = 1.0
"""Interval at which the controller decides."""
OPERATOR = "operator"
"""Cause of a change that an operator requested."""

_log = EventLogger("router")


class RoleMetrics:
    """Counts changes of roles, and reports the pressure that the controller measures."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.changes = Counter(
            "quire_role_changes_total",
            "Roles that this router changed, by the new role and the cause.",
            ["role", "cause"],
            registry=registry,
        )
        self._pressure = Gauge(
            "quire_role_pressure_ratio",
            "With --elastic-roles: expected times as shares of their targets, and the share of blocks taken.",
            ["kind"],
            registry=registry,
        )
        for role in ROLES:
            for cause in (OPERATOR, *CAUSES):
                self.changes.labels(role, cause)
        self.show(Pressure(0.0, 0.0, 0.0))

    def show(self, pressure: Pressure) -> None:
        """Show the present pressure."""
        for kind, share in pressure._asdict().items():
            self._pressure.labels(kind).set(share)


@dataclass(eq=False)
class Roles:
    """Changes the roles of a router's workers.

    Attributes:
        token_times: the number of output tokens so far, and the time that they took.
        controller: decides on changes; None: only an operator decides.
    """

    workers: WorkerSet
    metrics: RoleMetrics
    token_times: TokenTimes
    controller: ElasticRoles | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last: tuple[RoleChange, float] | None = None
        """The latest change that this router has made by itself, and its time, a reading of the clock."""
        self._changing = asyncio.Lock()
        """Allows one change at a time: two concurrent changes could remove the last decode worker."""

    async def change(
        self, worker: Worker, role: str, *, cause: str = OPERATOR, min_seconds_in_role: float = 0.0
    ) -> None:
        """Change a worker's role; on return, this router places new requests by the new role.

        Raises:
            InvalidArgument: there is no such role.
            FailedPrecondition: no decode worker would accept requests any more, or the worker refuses.
            Unavailable: the worker does not answer.
        """
        if role not in ROLES:
            raise InvalidArgument("role", f"must be prefill or decode; got {role!r}")
        async with self._changing:
            if worker.role == role:
                return
            others = [w for w in self.workers.serving("decode") if w is not worker]
            if role == "prefill" and not any(w.revision == worker.revision for w in others):
                raise FailedPrecondition(
                    f"no decode worker that takes requests would be left without {worker.worker_id}",
                    reason="LAST_DECODE_WORKER",
                )
            request = worker_pb2.SetRoleRequest(role=role, min_seconds_in_role=min_seconds_in_role)
            await _tell(worker, request)
            self.workers.set_role(worker, role)
            self.metrics.changes.labels(role, cause).inc()

    async def decide_forever(self, cluster: asyncio.Future[Cluster]) -> None:
        """Let the controller change roles once the model is known, until cancelled."""
        planner = (await asyncio.shield(cluster)).planner
        while True:
            await asyncio.sleep(DECISION_SECONDS)
            try:
                await self.decide(planner)
            except Exception:
                _log.exception("role_decision_failed")

    async def decide(self, planner: Planner) -> None:
        """Make the changes that the controller requests now."""
        if self.controller is None:
            return
        workers = {worker.worker_id: worker for role in ROLES for worker in self.workers.serving(role)}
        if len({worker.revision for worker in workers.values()}) > 1:
            return  # During an update, a change could leave a revision without workers of one role.
        states = [_state(worker, planner) for worker in workers.values()]
        changes = self.controller.decide(states, self._totals(planner))
        self.metrics.show(self.controller.pressure)
        for change in changes:
            await self._make(change, workers[change.worker_id])

    async def _make(self, change: RoleChange, worker: Worker) -> None:
        least = change.min_seconds_in_role
        try:
            await self.change(worker, change.role, cause=change.cause, min_seconds_in_role=least)
        except ServiceError as error:
            _log.warning("role_change_failed", worker=change.worker_id, role=change.role, error=error.message)
            return
        self._last = change, self.clock()
        _log.info(
            "role_changed",
            worker=change.worker_id,
            role=change.role,
            cause=change.cause,
            details=change.details,
        )

    def status(self) -> str:
        """Return the pressure and the last change in words; empty if only operators change roles."""
        if self.controller is None:
            return ""
        pressure = self.controller.pressure
        shares = f"TTFT {pressure.ttft:.0%}, TPOT {pressure.tpot:.0%}, blocks {pressure.room:.0%}"
        if self._last is None:
            return f"{shares} of the targets; no change yet"
        change, at = self._last
        age = self.clock() - at
        made = f"{change.worker_id} became {change.role} {age:.0f} s ago ({change.cause}: {change.details})"
        return f"{shares} of the targets; {made}"

    def _totals(self, planner: Planner) -> Totals:
        work, times = planner.work, self.token_times
        return Totals(
            work.num_prompts, work.remote_seconds, work.local_seconds, times.num_tokens, times.seconds
        )


def _state(worker: Worker, planner: Planner) -> RoleState:
    return RoleState(
        worker.worker_id,
        worker.role,
        pending_seconds=planner.pending_seconds(worker.worker_id, worker.pending_tokens),
        resident_tokens=worker.resident_tokens,
        capacity_tokens=worker.info.num_blocks * worker.info.layout.block_size,
    )


async def _tell(worker: Worker, request: worker_pb2.SetRoleRequest) -> None:
    try:
        with closed_channel_errors():
            await worker.stub.SetRole(request, timeout=CALL_SECONDS)
    except ChannelClosedError as error:
        raise Unavailable(f"worker {worker.worker_id} has left", reason="WORKER_FAILED") from error
    except grpc.aio.AioRpcError as error:
        problem = f"worker {worker.worker_id} keeps its role: {error.details()}"
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise FailedPrecondition(problem, reason="ROLE_TOO_NEW") from error
        raise Unavailable(f"{problem} ({error.code().name})", reason="WORKER_FAILED") from error
