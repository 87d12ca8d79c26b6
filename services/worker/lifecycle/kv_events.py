"""Publishes a worker's blocks to gateways that build an index of their own from KV events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.protos.worker_pb2 import CacheScope
from quire.services.worker.config import WorkerConfig
from quire.services.worker.identity import WorkerIdentity

BEAT_SECONDS = 3600.0
"""There is no lease to renew."""


@dataclass(frozen=True)
class Listeners:
    """The listeners of an engine; ``events`` is told of new blocks later, together with their tokens.

    The two have their own ledgers, so neither a Redis that fails nor a slow gateway delays the other one.
    """

    index: BlockPublisher | None
    events: BlockPublisher

    def stored(self, block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        """Record that consecutive blocks of a prompt became reusable."""
        if self.index is not None:
            self.index.stored(block_hashes, parent_hash)

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Record that blocks were evicted."""
        if self.index is not None:
            self.index.removed(block_hashes)
        self.events.removed(block_hashes)


def open_events(
    config: WorkerConfig, identity: WorkerIdentity, stack: AsyncExitStack
) -> BlockPublisher | None:
    """Listen for subscribers, if that is configured; nothing is published before ``start``.

    Raises:
        OSError: one of the ports is taken.
    """
    if config.kv_events is None:
        return None
    # Needs an extra.
    from quire.kvindex.event_lease import EventLease

    ledger, shared_root = PublishLedger(), identity.root_hash(CacheScope())
    lease = EventLease(config.kv_events, identity.model, shared_root, ledger, lambda: publisher.join_again())
    stack.callback(lease.close)
    loop = asyncio.get_running_loop()
    publisher = BlockPublisher(lease, ledger, loop, BEAT_SECONDS, rejoin_jitter_seconds=0.0)
    return publisher
