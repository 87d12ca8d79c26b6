"""Adds up the load of a worker's requests, so that each router learns what the others have sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.protos import worker_pb2


class RequestLoads:
    """The loads of the running requests, by the router that sent them.

    Requests of gateways, which no router sent, count under the empty id.

    Args:
        on_change: called after each change.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._by_router: defaultdict[str, worker_pb2.TotalLoad] = defaultdict(worker_pb2.TotalLoad)
        self._pending: dict[str, worker_pb2.RequestLoad] = {}
        """The loads of requests whose prompts must still be computed here, by attempt."""

    @contextmanager
    def counted(
        self, attempt_id: str, load: worker_pb2.RequestLoad, *, is_resident: bool, computes_prompt: bool
    ) -> Iterator[None]:
        """Count a request until the context ends.

        Args:
            is_resident: whether its answer is generated here.
            computes_prompt: whether its prompt is computed here; see ``record_computed``.
        """
        total = self._by_router[load.router_id]
        resident_tokens = load.resident_tokens if is_resident else 0
        total.num_requests += 1
        total.resident_tokens += resident_tokens
        if computes_prompt:
            total.pending_tokens += load.pending_tokens
            self._pending[attempt_id] = load
        self._on_change()
        try:
            yield
        finally:
            self.record_computed(attempt_id)
            total.num_requests -= 1
            total.resident_tokens -= resident_tokens
            if not total.num_requests:
                del self._by_router[load.router_id]
            self._on_change()

    def record_computed(self, attempt_id: str) -> None:
        """Subtract the pending tokens of a request whose prompt has been computed."""
        load = self._pending.pop(attempt_id, None)
        if load is not None:
            self._by_router[load.router_id].pending_tokens -= load.pending_tokens
            self._on_change()

    def of_others(self, router_id: str) -> worker_pb2.TotalLoad:
        """Return the load of all requests except those of one router."""
        loads = [load for owner, load in self._by_router.items() if owner != router_id or not owner]
        return worker_pb2.TotalLoad(
            num_requests=sum(load.num_requests for load in loads),
            pending_tokens=sum(load.pending_tokens for load in loads),
            resident_tokens=sum(load.resident_tokens for load in loads),
        )
