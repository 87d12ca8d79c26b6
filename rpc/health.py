"""Whether a process can serve now and why not, and gRPC's health service that tells it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from grpc_health.v1 import health, health_pb2

STATUS_KEY, REASON_KEY = "quire-status", "quire-reason"
"""Keys of the trailing metadata in which ``Check`` tells the status and the reason."""


class Health(NamedTuple):
    """Whether a process can serve requests now.

    Attributes:
        status: "stalled" if requests are in work that make no progress, or if nothing runs any more.
        reason: why it is not ready, in ASCII since metadata has no other characters; empty if it is ready.
    """

    status: Literal["ready", "not_ready", "stalled"]
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether it can serve."""
        return self.status == "ready"


READY = Health("ready")
STARTING = Health("not_ready", "it is starting")
STOPPING = Health("not_ready", "it is stopping")


class HealthServicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """gRPC's health service; the answers of ``Check`` also have the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.health = STARTING

    async def report(self, health: Health, names: tuple[str, ...]) -> None:
        """Answer with this health from now on, for the server and its services."""
        self.health = health
        answers = health_pb2.HealthCheckResponse
        for name in names:
            await self.set(name, answers.SERVING if health.is_ready else answers.NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        """Return the status; the trailing metadata has the reason."""
        context.set_trailing_metadata(((STATUS_KEY, self.health.status), (REASON_KEY, self.health.reason)))
        return await super().Check(request, context)
