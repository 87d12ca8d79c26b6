"""Asks the prefill worker, after an answer, to copy the answer's blocks from the decode worker.

The next turn of the conversation then finds the whole conversation cached on its prefill worker. Copies run
only in idle time: only a few at once, with a short time limit, and no request waits for them.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from quire.protos import worker_pb2
from quire.services.router.block_copies import copy_blocks, num_sealed_blocks
from quire.services.router.worker import Worker
from quire.services.router.worker_calls import Spawn

MAX_UNDER_WAY = 4
"""Maximum number of copies in flight on all workers together; further ones are dropped."""
WAIT_SECONDS = 2.0
"""Time limit of a copy, including its wait for an idle worker."""


class WriteBackMetrics:
    """Counts the copies by result, and the blocks copied."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.results = Counter(
            "quire_write_backs_total",
            "Answers whose blocks were to be copied to the prefill worker, by how it ended.",
            ["result"],
            registry=registry,
        )
        self.blocks = Counter(
            "quire_write_back_blocks_total", "Blocks copied to prefill workers.", registry=registry
        )
        for result in ("ok", "dropped", "failed"):
            self.results.labels(result)


class WriteBackCalls:
    """Starts copies, and limits how many are in flight."""

    def __init__(self, spawn: Spawn, metrics: WriteBackMetrics) -> None:
        self._spawn = spawn
        self._metrics = metrics
        self.num_under_way = 0

    def offer(
        self,
        decode: Worker,
        prefill: Worker,
        token_ids: list[int],
        num_prompt_tokens: int,
        scope: worker_pb2.CacheScope,
    ) -> None:
        """Start to copy the blocks that a sequence has after its prompt, unless too many are in flight.

        Args:
            token_ids: the prompt and the answer.
        """
        block_size = prefill.info.layout.block_size
        if num_sealed_blocks(len(token_ids), block_size) <= num_prompt_tokens // block_size:
            return
        if self.num_under_way >= MAX_UNDER_WAY:
            self._metrics.results.labels("dropped").inc()
            return
        self.num_under_way += 1
        self._spawn(self._copy(decode, prefill, token_ids, scope))

    async def _copy(
        self, decode: Worker, prefill: Worker, token_ids: list[int], scope: worker_pb2.CacheScope
    ) -> None:
        time = worker_pb2.COPY_TIME_IDLE
        try:
            pulled = await copy_blocks(decode, prefill, token_ids, scope, time=time, seconds=WAIT_SECONDS)
        finally:
            self.num_under_way -= 1
        self._metrics.results.labels(pulled.failure or "ok").inc()
        self._metrics.blocks.inc(pulled.num_blocks)
