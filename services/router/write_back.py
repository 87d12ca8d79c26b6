"""Asks the prefill worker, after an answer, to copy the answer's blocks from the decode worker.

The next turn of the conversation then finds the whole conversation cached on its prefill worker. Copies run
only in idle time: only a few at once, with a short time limit, and no request waits for them.
"""

from __future__ import annotations

import secrets

import grpc
from prometheus_client import CollectorRegistry, Counter

from quire.protos import worker_pb2
from quire.services.router.worker import Worker
from quire.services.router.worker_calls import Spawn
from quire.services.server.closed_channel import ChannelClosedError, closed_channel_errors
from quire.services.server.log import get_logger

MAX_UNDER_WAY = 4
"""Maximum number of copies in flight on all workers together; further ones are dropped."""
WAIT_SECONDS = 2.0
"""Time limit of a copy, including its wait for an idle worker."""

_log = get_logger("router")


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
        # The last token was sampled but never computed, so it has no KV.
        num_blocks = (len(token_ids) - 1) // block_size
        if num_blocks <= num_prompt_tokens // block_size:
            return
        if self.num_under_way >= MAX_UNDER_WAY:
            self._metrics.results.labels("dropped").inc()
            return
        self.num_under_way += 1
        source = worker_pb2.PullSource(
            address=decode.peer_address,
            epoch=decode.info.epoch,
            num_blocks=num_blocks,
            timeout_ms=int(1000 * WAIT_SECONDS),
        )
        request = worker_pb2.WriteBackRequest(
            sequence_id=f"write-back-{secrets.token_hex(8)}",
            token_ids=token_ids,
            cache_scope=scope,
            pull_from=source,
        )
        self._spawn(self._copy(prefill, request))

    async def _copy(self, prefill: Worker, request: worker_pb2.WriteBackRequest) -> None:
        try:
            with closed_channel_errors():
                response = await prefill.stub.WriteBack(request, timeout=2 * WAIT_SECONDS)
        except (grpc.aio.AioRpcError, ChannelClosedError) as error:
            self._metrics.results.labels("failed").inc()
            _log.debug("write_back_failed", worker=prefill.worker_id, error=error)
            return
        finally:
            self.num_under_way -= 1
        self._metrics.results.labels(response.pulled.failure or "ok").inc()
        self._metrics.blocks.inc(response.pulled.num_blocks)
