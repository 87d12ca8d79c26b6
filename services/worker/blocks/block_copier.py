"""Copies blocks of a sequence from a peer into this worker's cache, before a request asks for them."""

from __future__ import annotations

import asyncio

from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineThread
from quire.engine.sequences.sequence import Sequence
from quire.protos import worker_pb2
from quire.sampling.params import SamplingParams
from quire.services.worker.blocks.prefix_pull import PrefixPuller

POLL_SECONDS = 0.02
WAIT_SECONDS = 5.0
"""Longest wait of a copy that is not urgent, unless the router gives a time."""
MAX_USED_SHARE = 0.5
"""Such a copy begins only if at most this share of the pool is in use, since requests need the rest."""


class BlockCopier:
    """Makes urgent copies immediately, and others one by one while enough of the pool is free."""

    def __init__(self, engine: EngineThread, puller: PrefixPuller) -> None:
        self._engine = engine
        self._puller = puller
        self._one_at_a_time = asyncio.Lock()

    async def copy(self, request: worker_pb2.CopyBlocksRequest, root_hash: bytes) -> worker_pb2.PullSummary:
        """Copy blocks; return their number. The failure is "busy" if the copy could not begin in time."""
        tokens = list(request.token_ids)
        sequence = Sequence(request.sequence_id, tokens, len(tokens), SamplingParams(), root_hash)
        if request.time == worker_pb2.COPY_TIME_NOW:
            return await self._puller.pull(sequence, request.pull_from)
        try:
            async with asyncio.timeout(request.pull_from.timeout_ms / 1000 or WAIT_SECONDS):
                await self._one_at_a_time.acquire()
                try:
                    await self._until_there_is_room()
                    return await self._puller.pull(sequence, request.pull_from)
                finally:
                    self._one_at_a_time.release()
        except TimeoutError:
            return worker_pb2.PullSummary(failure="busy")

    async def _until_there_is_room(self) -> None:
        while not await self._engine.call(_has_room):  # noqa: ASYNC110 - the engine reports no such event
            await asyncio.sleep(POLL_SECONDS)


def _has_room(engine: Engine) -> bool:
    return engine.pool.counts.used <= MAX_USED_SHARE * engine.pool.num_blocks
