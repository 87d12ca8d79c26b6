"""Names the workers of an attempt."""

from __future__ import annotations

from typing import NamedTuple

from quire.protos import worker_pb2
from quire.routing.placement import Placement
from quire.services.router.workers.worker import Worker


class Plan(NamedTuple):
    """The workers of an attempt; without a prefill worker, the decode worker computes the prompt."""

    decode: Worker
    prefill: Worker | None
    placement: Placement
    """The planner's reasons for these workers, and its estimates."""
    pull_from: worker_pb2.PullSource | None = None
    """Peer from which the worker that computes the prompt first copies blocks; None: no pull."""


class NextWorker(NamedTuple):
    """The decode worker to which an answer moves, and how many tokens of its beginning are cached there."""

    worker: Worker
    num_cached_tokens: int
