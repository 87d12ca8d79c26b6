"""Copies the blocks of running answers to another worker, so that a failure costs little computation.

When a worker dies, the next attempt of an answer continues from its prompt and the tokens already sent.
Without copies, these tokens are computed again. With them, the attempt takes the blocks from the worker that
has the copy, like any cached block, and computes only the tokens that came after the last copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter

from quire.protos import worker_pb2
from quire.services.router.answer_group import AnswerGroup
from quire.services.router.block_copies import copy_blocks
from quire.services.router.followers import OnParts, RunningAttempt
from quire.services.router.worker import Worker
from quire.services.router.worker_set import WorkerSet
from quire.services.server.background import Spawn

INTERVAL_TOKENS = 256
"""New tokens of an answer after which it is copied again; shorter answers are never copied."""
MAX_UNDER_WAY = 4
"""Maximum number of copies in flight on all workers together; answers that find no place try again."""
WAIT_SECONDS = 2.0
"""Time limit of a copy, including its wait for room in the other worker's pool."""


class AnswerCopyMetrics:
    """Counts the copies by result, and the blocks copied."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.results = Counter(
            "quire_answer_copies_total",
            "Copies of running answers to another worker, by how they ended.",
            ["result"],
            registry=registry,
        )
        self.blocks = Counter(
            "quire_answer_copy_blocks_total", "Blocks of running answers that were copied.", registry=registry
        )
        for result in ("ok", "busy", "failed"):
            self.results.labels(result)


class AnswerCopies:
    """Chooses where answers are copied to, and limits how many copies are in flight."""

    def __init__(self, workers: WorkerSet, spawn: Spawn, metrics: AnswerCopyMetrics) -> None:
        self._workers = workers
        self._spawn = spawn
        self._metrics = metrics
        self._num_under_way = 0

    @contextmanager
    def follow(self, attempt: RunningAttempt) -> Iterator[OnParts | None]:
        """Copy the answers of an attempt as they grow; those of a beam search are known only at its end."""
        if attempt.group.is_beam_search:
            yield None
            return
        plan = attempt.plan
        yield FollowedAnswers(self, attempt.group, plan.decode, plan.prefill, attempt.scope).advance

    def offer(self, followed: FollowedAnswers) -> bool:
        """Start to copy the answers of an attempt; return whether there was a place for it."""
        target = self._target(followed)
        if target is None or self._num_under_way >= MAX_UNDER_WAY:
            return False
        self._num_under_way += 1
        self._spawn(self._copy(followed, target))
        return True

    def _target(self, followed: FollowedAnswers) -> Worker | None:
        """Return the prefill worker, which has the prompt already, or another one by rendezvous hashing.

        Rendezvous hashing (Thaler and Ravishankar, 1998) gives an answer the same place each time while the
        workers are the same, and divides the answers of a worker among all others.
        """
        if followed.prefill is not None and followed.prefill.can_serve:
            return followed.prefill
        others = [worker for worker in self._workers.serving("decode") if worker is not followed.decode]
        key = followed.group.sequence_id
        return max(
            others or self._workers.serving("prefill"),
            key=lambda worker: hashlib.sha256(f"{key} {worker.worker_id}".encode()).digest(),
            default=None,
        )

    async def _copy(self, followed: FollowedAnswers, target: Worker) -> None:
        group, time = followed.group, worker_pb2.COPY_TIME_ROOM
        try:
            for answer in group.answers:
                pulled = await copy_blocks(
                    followed.decode,
                    target,
                    group.prompt_token_ids + answer.token_ids,
                    followed.scope,
                    time=time,
                    seconds=WAIT_SECONDS,
                )
                self._metrics.results.labels(pulled.failure or "ok").inc()
                self._metrics.blocks.inc(pulled.num_blocks)
        finally:
            self._num_under_way -= 1
            followed.is_under_way = False


class FollowedAnswers:
    """The answers of one attempt, and how far they have been copied."""

    def __init__(
        self,
        copies: AnswerCopies,
        group: AnswerGroup,
        decode: Worker,
        prefill: Worker | None,
        scope: worker_pb2.CacheScope,
    ) -> None:
        self.group = group
        self.decode = decode
        self.prefill = prefill
        self.scope = scope
        self.is_under_way = False
        self._copies = copies
        self._next_copy = group.num_tokens + INTERVAL_TOKENS

    def advance(self) -> None:
        """Copy the answers if they have grown by ``INTERVAL_TOKENS`` since the last copy."""
        num_tokens = self.group.num_tokens
        if num_tokens < self._next_copy or self.is_under_way or self.group.is_finished:
            return
        if self._copies.offer(self):
            self.is_under_way = True
            self._next_copy = num_tokens + INTERVAL_TOKENS
