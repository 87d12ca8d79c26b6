"""Runs one text of a request for embeddings in the router: one worker computes it and answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from quire.models.embeddings import Pooling
from quire.protos import worker_pb2
from quire.routing.placement import Placement, PlannedPrompt
from quire.routing.policy import receiving
from quire.services.router.execution.attempt import Attempt
from quire.services.router.execution.failures import WorkerCallFailed
from quire.services.router.execution.generation import GenerationRun
from quire.services.router.execution.worker_calls import NextWorker
from quire.services.router.execution.worker_choice import WorkerChoice
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.router.outputs.merge import merged
from quire.services.router.workers.answer_part import AnswerPart
from quire.services.router.workers.worker import Worker


class EmbeddingChoice(WorkerChoice):
    """Chooses the only worker of an attempt: a prefill worker if there is one, or else a decode worker."""

    async def _wait(self, group: AnswerGroup) -> None:
        if not self.cluster.workers.serving("prefill"):
            await super()._wait(group)

    async def _look_up(self, group: AnswerGroup) -> PlannedPrompt:
        if self.cluster.model.embedding.pooling == Pooling.LAST:
            return await super()._look_up(group)
        # The other kinds read the states of cached tokens too, so these are computed again.
        return PlannedPrompt(len(group.token_ids), (), {})

    async def _place(self, group: AnswerGroup, next_worker: NextWorker | None) -> Placement | None:
        if (placement := await super()._place(group, next_worker)) is None:
            return None
        reason = placement.prefill_reason or placement.decode_reason
        chosen = placement.estimate.candidate
        return placement._replace(decode=chosen, decode_reason=reason, prefill_reason=None)

    def _serving(self, role: str, group: AnswerGroup) -> list[Worker]:
        by_role = super()._serving("prefill", group), super()._serving("decode", group)
        # Vectors of different weights cannot be compared, so only one revision at a time computes them.
        revisions = receiving(*([worker.revision for worker in workers] for workers in by_role))[:1]
        chosen = [[worker for worker in workers if worker.revision in revisions] for workers in by_role]
        return chosen[0] or chosen[1]


class EmbeddingAttempt(Attempt):
    """One attempt of a text on one worker.

    Attributes:
        dimensions: number of first values to compute; 0 means all.
        embedding: the values; empty before the end.
    """

    dimensions = 0
    embedding: Sequence[float] = ()

    async def _parts(self, remaining_seconds: Callable[[], float]) -> AsyncGenerator[list[AnswerPart], None]:
        request = worker_pb2.PrefillRequest(
            sequence=self._sequence, pull_from=self._pull_from, embedding_dimensions=self.dimensions
        )
        timeout, metadata = remaining_seconds(), self._account.phases.span.metadata
        start = self._account.clock()
        self._calls.start(self.decode, self.decode.stub.Prefill(request, timeout=timeout, metadata=metadata))
        event = await self._calls.next()
        if event.message is None or not event.message.embedding:
            raise WorkerCallFailed(event.worker, event.error)
        self._account.record_prefill(event.message)
        self._account.record_computed(self.group, self._placement, event.message, start)
        self.embedding = event.message.embedding
        await self._finish_calls()
        yield []


class EmbeddingRun(GenerationRun):
    """Serves one text in one or more attempts, which fail and are retried like those of a generation."""

    _make_choice = EmbeddingChoice

    async def embedding(self, dimensions: int) -> Sequence[float]:
        """Return the first ``dimensions`` values of the embedding; 0 means all.

        Raises:
            ServiceError: the text cannot be served or cannot be completed.
        """
        cluster, account = self._cluster, self._account
        group = self._group()
        async with aclosing(self._choice):
            while True:
                try:
                    placement = await self._choice.choose(group, None)
                    sequence = self._sequence(group, placement)
                    attempt = EmbeddingAttempt(
                        cluster.workers, cluster.spawn, placement, group, sequence, account
                    )
                    attempt.dimensions = dimensions
                    running = attempt.outputs((cluster.suspects.follow,), self._remaining_seconds)
                    async with aclosing(running) as outputs:
                        async for _ in outputs:
                            return attempt.embedding
                except WorkerCallFailed as failure:
                    await self._give_up_attempt(group, failure)


async def run_all(
    runs: Sequence[EmbeddingRun], dimensions: int, num_at_once: int
) -> dict[int, Sequence[float]]:
    """Return the embeddings by the index of their text; the first error ends all texts and is raised."""
    places = asyncio.Semaphore(num_at_once)

    async def run_one(at: int, run: EmbeddingRun) -> AsyncGenerator[tuple[int, Sequence[float]], None]:
        async with places:
            yield at, await run.embedding(dimensions)

    async with aclosing(merged(run_one(*each) for each in enumerate(runs))) as found:
        return dict([each async for each in found])
