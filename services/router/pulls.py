"""Whether a worker copies blocks that a peer holds instead of computing them, by what both have cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.kvtransfer.layout import KvLayout
from quire.protos import worker_pb2
from quire.services.log import get_logger
from quire.services.router import policy
from quire.services.router.workers import Worker

PULL_BYTES_PER_SECOND = 1e9
"""Taken to be a peer's until a pull from it was measured."""
PREFILL_TOKENS_PER_SECOND = 10_000.0
"""Taken to be a worker's until a prompt of its was measured."""
NEWEST_SHARE = 0.3
"""Weight of the last measurement in a moving average."""
MIN_MEASURED_TOKENS = 64
"""Shorter prompts tell of overheads, not of speed."""
MIN_TIMEOUT_SECONDS = 0.5

_log = get_logger("router")


class MovingAverages:
    """Exponentially weighted averages by name."""

    def __init__(self, initial: float) -> None:
        self._initial = initial
        self._values: dict[str, float] = {}

    def get(self, name: str) -> float:
        """Return the average; the initial value before the first measurement."""
        return self._values.get(name, self._initial)

    def add(self, name: str, value: float) -> None:
        """Add a measurement."""
        old = self._values.get(name)
        self._values[name] = value if old is None else old + NEWEST_SHARE * (value - old)


class PullPlanner:
    """Chooses pulls and learns from how they went."""

    def __init__(self) -> None:
        self._pull_rates = MovingAverages(PULL_BYTES_PER_SECOND)
        self._prefill_rates = MovingAverages(PREFILL_TOKENS_PER_SECOND)

    def plan(
        self,
        request_id: str,
        worker: Worker,
        peers: Iterable[Worker],
        cached_tokens: Mapping[str, int],
        num_tokens: int,
    ) -> worker_pb2.PullSource | None:
        """Return whose blocks the worker copies before it computes the rest; None if it computes all."""
        layout = KvLayout.from_proto(worker.info.layout)
        held = {w.worker_id: w for w in peers if w is not worker and cached_tokens.get(w.worker_id)}
        if not held:
            return None
        pull = policy.choose_pull(
            cached_tokens.get(worker.worker_id, 0),
            [
                policy.Peer(name, min(cached_tokens[name], num_tokens), self._pull_rates.get(w.address))
                for name, w in held.items()
            ],
            block_size=layout.block_size,
            block_bytes=layout.block_bytes,
            tokens_per_second=self._prefill_rates.get(worker.worker_id),
        )
        if pull is None:
            return None
        _log.debug(
            "pull_chosen",
            request_id=request_id,
            worker=worker.worker_id,
            peer=pull.worker_id,
            blocks=pull.num_blocks,
            pull_seconds=pull.pull_seconds,
            compute_seconds=pull.compute_seconds,
        )
        peer = held[pull.worker_id]
        return worker_pb2.PullSource(
            address=peer.address,
            epoch=peer.info.epoch,
            num_blocks=pull.num_blocks,
            timeout_ms=int(1000 * (MIN_TIMEOUT_SECONDS + 2 * pull.pull_seconds)),
        )

    def pulled(self, source: worker_pb2.PullSource, summary: worker_pb2.PullSummary) -> None:
        """Learn how fast a peer's blocks came."""
        if summary.num_bytes and not summary.failure:
            self._pull_rates.add(source.address, summary.num_bytes / summary.seconds)

    def computed(self, worker: Worker, num_tokens: int, seconds: float) -> None:
        """Learn how fast a worker computes prompts, its queue included."""
        if num_tokens >= MIN_MEASURED_TOKENS and seconds > 0:
            self._prefill_rates.add(worker.worker_id, num_tokens / seconds)
