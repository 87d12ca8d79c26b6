"""Bounds the memory that a router uses for its running requests.

Admission bounds the number of requests, but one may have 16 MiB, and a thousand such requests would use more
memory than a machine has. The bytes of a request count as they arrive, until its answer has ended. The first
bytes of each request do not count, so large requests never block small ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.rpc.errors import RETRY_AFTER_SECONDS, ResourceExhausted
from quire.rpc.request_intake import AddBytes
from quire.services.router.metrics.metrics import RouterMetrics

UNCOUNTED_BYTES = 64 << 10
"""Bytes of each request that do not count; most requests are smaller."""


class RequestMemory:
    """The bytes of the running requests of both the gRPC and the HTTP API.

    Attributes:
        num_bytes: their sum, without the bytes that do not count.

    Args:
        max_bytes: its maximum.
        metrics: show the sum, and count refused requests.
    """

    def __init__(self, max_bytes: int, metrics: RouterMetrics) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._metrics = metrics

    @contextmanager
    def request(self) -> Iterator[AddBytes]:
        """Yield a function that counts more or (below 0) fewer bytes of one request, until the context ends.

        The function raises ``ResourceExhausted`` if the bytes would exceed ``max_bytes``.
        """
        num_read = num_counted = 0

        def add(num_bytes: int) -> None:
            nonlocal num_read, num_counted
            num_read += num_bytes
            num_more = max(0, num_read - UNCOUNTED_BYTES) - num_counted
            if self.num_bytes + num_more > self._max_bytes:
                raise self._refusal()
            num_counted += num_more
            self._change(num_more)

        try:
            yield add
        finally:
            self._change(-num_counted)

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._metrics.request_bytes.set(self.num_bytes)

    def _refusal(self) -> ResourceExhausted:
        self._metrics.rejections.labels("max_request_bytes").inc()
        return ResourceExhausted(
            f"the requests under way hold {self.num_bytes} bytes of the {self._max_bytes} that this router "
            "takes; try again",
            reason="OVERLOADED",
            metadata={"limit": str(self._max_bytes)},
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
