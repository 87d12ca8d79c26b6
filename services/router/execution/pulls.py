"""Describes a chosen pull to the worker that performs it."""

from __future__ import annotations

from quire.protos import worker_pb2
from quire.routing.policy import PullChoice
from quire.services.router.workers.worker import Worker

MIN_TIMEOUT_SECONDS = 0.5


def pull_source(pull: PullChoice, peer: Worker) -> worker_pb2.PullSource:
    """Return the message that describes a pull from a peer.

    The timeout is ``MIN_TIMEOUT_SECONDS`` plus twice the expected time.
    """
    return worker_pb2.PullSource(
        address=peer.peer_address,
        epoch=peer.info.epoch,
        num_blocks=pull.num_blocks,
        timeout_ms=int(1000 * (MIN_TIMEOUT_SECONDS + 2 * pull.pull_seconds)),
    )
