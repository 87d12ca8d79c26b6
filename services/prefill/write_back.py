"""Copies what a decode worker has added to a sequence back to the prefill worker, for the next turn."""

from __future__ import annotations

import asyncio

from quire.engine.engine_thread import EngineThread
from quire.engine.sequence import Sequence
from quire.protos import worker_pb2
from quire.sampling.params import SamplingParams
from quire.services.worker.prefix_pull import PrefixPuller

POLL_SECONDS = 0.02
WAIT_SECONDS = 5.0
"""How long a copy waits for the worker to become idle, unless the router says."""
MAX_USED_SHARE = 0.5
"""Largest share of the pool in use: beyond it there are better uses for the other blocks."""


class WriteBackCopier:
    """One copy after the other, each when the engine has nothing to compute."""

    def __init__(self, engine: EngineThread, puller: PrefixPuller) -> None:
        self._engine = engine
        self._puller = puller
        self._one_at_a_time = asyncio.Lock()

    async def copy(self, request: worker_pb2.WriteBackRequest, root_hash: bytes) -> worker_pb2.PullSummary:
        """Return what was copied, or "busy" if the engine was so until the request's time was over."""
        tokens = list(request.token_ids)
        sequence = Sequence(request.sequence_id, tokens, len(tokens), SamplingParams(), root_hash)
        try:
            async with asyncio.timeout(request.pull_from.timeout_ms / 1000 or WAIT_SECONDS):
                await self._one_at_a_time.acquire()
                try:
                    await self._idle()
                    return await self._puller.pull(sequence, request.pull_from)
                finally:
                    self._one_at_a_time.release()
        except TimeoutError:
            return worker_pb2.PullSummary(failure="busy")

    async def _idle(self) -> None:
        while not await self._engine.call(  # noqa: ASYNC110 - the engine reports no such event
            lambda e: e.is_idle and e.pool.counts.used <= MAX_USED_SHARE * e.pool.num_blocks
        ):
            await asyncio.sleep(POLL_SECONDS)
