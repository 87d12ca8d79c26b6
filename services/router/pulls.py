"""Tells a worker whose blocks to copy."""

from __future__ import annotations

from quire.protos import worker_pb2
from quire.services.router.policy import PullChoice
from quire.services.router.workers import Worker

MIN_TIMEOUT_SECONDS = 0.5


def pull_source(pull: PullChoice, peer: Worker) -> worker_pb2.PullSource:
    """Return a chosen pull as the worker gets it; it may take twice what is expected, and a little."""
    return worker_pb2.PullSource(
        address=peer.address,
        epoch=peer.info.epoch,
        num_blocks=pull.num_blocks,
        timeout_ms=int(1000 * (MIN_TIMEOUT_SECONDS + 2 * pull.pull_seconds)),
    )
