"""Moves running answers from a worker that drains to other workers.

A move is an attempt that follows another without a failure. While the worker generates on, another worker
copies the full blocks of the answer. Then the attempt ends, and the next one continues there from
the prompt and the tokens already sent, with the same seed. It computes only the tokens again that came after
the copy, in one step: to copy their open block would take longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import prometheus_client

from quire.protos import worker_pb2
from quire.services.router.answer_group import AnswerGroup
from quire.services.router.block_copies import copy_blocks, num_sealed_blocks
from quire.services.router.followers import RunningAttempt
from quire.services.router.output import OutputAssembler
from quire.services.router.plan import NextWorker
from quire.services.router.worker import Worker
from quire.services.router.worker_set import WorkerSet
from quire.services.server.background import Spawn
from quire.services.server.log import get_logger

MAX_UNDER_WAY = 4
"""Maximum number of answers that are copied at the same time."""
MAX_COPIES = 3
"""Maximum number of copies of an answer: each brings the blocks that were filled during the one before."""
COPY_SECONDS = 5.0
"""Time limit of a copy."""
MAX_MISSING_BLOCKS = 16
"""An answer that would have to compute more blocks again stays where it is."""

_log = get_logger("router")


class MoveMetrics:
    """Counts the answers of workers that drain, by what became of them."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        self.results = prometheus_client.Counter(
            "quire_moves_total",
            "Attempts on draining workers that moved, or stayed because blocks were not copied.",
            ["result"],
            registry=registry,
        )
        for result in ("moved", "stayed"):
            self.results.labels(result)


@dataclass(eq=False, slots=True)
class _Movable:
    """An attempt that can be moved."""

    group: AnswerGroup
    worker: Worker
    scope: worker_pb2.CacheScope
    move: Callable[[NextWorker], None]
    is_moving: bool = False
    has_stayed: bool = False


class _Copied(NamedTuple):
    """Full blocks of an answer on the worker that it moves to: those that are there, and the others."""

    num_held: int
    num_missing: int


class Moves:
    """Knows the attempts on each decode worker, and moves them once it drains.

    The answers of a beam search, and those with a KV budget, stay until they end: they depend on more than
    their prompt, their tokens and their seed.
    """

    def __init__(self, workers: WorkerSet, spawn: Spawn, metrics: MoveMetrics) -> None:
        self._workers = workers
        self._spawn = spawn
        self._metrics = metrics
        self._running: defaultdict[Worker, set[_Movable]] = defaultdict(set)
        self._slots = asyncio.Semaphore(MAX_UNDER_WAY)
        self._coming: Tally[Worker] = Tally()
        """Tokens of the answers that are being copied to each worker."""
        workers.call_on_drain(self._start)
        workers.call_on_return(self._start_all)

    @contextmanager
    def follow(self, running: RunningAttempt) -> Iterator[None]:
        """Let an attempt be moved until the context ends."""
        group, worker = running.group, running.plan.decode
        if group.is_beam_search or group.params.kv_budget_tokens is not None:
            yield
            return
        attempt = _Movable(group, worker, running.scope, running.move)
        self._running[worker].add(attempt)
        if worker.health.is_draining:
            self._start(worker)
        try:
            yield
        finally:
            self._running[worker].discard(attempt)
            if not self._running[worker]:
                del self._running[worker]

    def _start_all(self) -> None:
        """Try again: another worker has come."""
        for worker in [worker for worker in self._running if worker.health.is_draining]:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        for attempt in self._running.get(worker, ()):
            if not (attempt.is_moving or attempt.has_stayed):
                attempt.is_moving = True
                self._spawn(self._move(attempt))

    async def _move(self, attempt: _Movable) -> None:
        try:
            async with self._slots:
                target = self._target(attempt)
                if target is None or not self._must_move(attempt):
                    return
                copied = await self._copy_answers(attempt, target)
        finally:
            attempt.is_moving = False
        # Meanwhile it may have ended, or the operator may have taken the worker back.
        if not self._must_move(attempt):
            return
        group = attempt.group
        has_begun = any(answer.token_ids for answer in group.answers)
        attempt.has_stayed = has_begun and max(each.num_missing for each in copied) > MAX_MISSING_BLOCKS
        result = "stayed" if attempt.has_stayed else "moved"
        self._metrics.results.labels(result).inc()
        _log.info(
            f"answer_{result}",
            sequence_id=group.sequence_id,
            attempt=group.attempt,
            worker=attempt.worker.worker_id,
            to=target.worker_id,
            missing_blocks=sum(each.num_missing for each in copied),
        )
        if not attempt.has_stayed:
            num_held = min(each.num_held for each in copied)
            attempt.move(NextWorker(target, num_held * target.info.layout.block_size))

    def _must_move(self, attempt: _Movable) -> bool:
        """Return whether the attempt still runs on a worker that drains."""
        return attempt.worker.health.is_draining and attempt in self._running.get(attempt.worker, ())

    def _target(self, attempt: _Movable) -> Worker | None:
        """Return the decode worker with the most room, or None if no other takes requests.

        A worker with another version of the arithmetic would compute other bits, so it gets no answer.
        """
        descriptor = attempt.worker.info.cache_descriptor
        others = (each for each in self._workers.serving("decode") if each is not attempt.worker)
        serving = [worker for worker in others if worker.info.cache_descriptor == descriptor]
        healthy = [worker for worker in serving if not worker.health.is_unhealthy]
        return min(healthy or serving, key=self._share_in_use, default=None)

    def _share_in_use(self, worker: Worker) -> float:
        resident = worker.resident_tokens + worker.load_of_others.resident_tokens + self._coming[worker]
        return resident / max(1, worker.info.num_blocks)

    async def _copy_answers(self, attempt: _Movable, target: Worker) -> list[_Copied]:
        """Copy the full blocks of all answers of an attempt, one answer after the other."""
        num_tokens = sum(
            len(attempt.group.prompt_token_ids + each.token_ids) for each in attempt.group.answers
        )
        self._coming[target] += num_tokens
        try:
            return [await self._copy(attempt, target, each) for each in attempt.group.answers]
        finally:
            self._coming[target] -= num_tokens

    async def _copy(self, attempt: _Movable, target: Worker, answer: OutputAssembler) -> _Copied:
        """Copy the full blocks of an answer until none was filled meanwhile."""
        prompt, block_size = attempt.group.prompt_token_ids, target.info.layout.block_size
        time = worker_pb2.COPY_TIME_NOW
        result = _Copied(0, 0)
        for _ in range(MAX_COPIES):
            token_ids = prompt + answer.token_ids
            pulled = await copy_blocks(
                attempt.worker, target, token_ids, attempt.scope, time=time, seconds=COPY_SECONDS
            )
            num_held = pulled.num_held_blocks + pulled.num_blocks
            num_sealed = num_sealed_blocks(len(prompt) + len(answer.token_ids), block_size)
            result = _Copied(num_held, max(0, num_sealed - num_held))
            if not result.num_missing or not pulled.num_blocks:
                break
        return result
