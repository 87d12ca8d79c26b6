"""Copies the blocks of running answers to other workers, so that the answers can go on there.

**Answers on a worker that drains move.** A move is an attempt that follows another without a failure.
While the draining worker continues to generate, another worker copies the full blocks of the answer. Then
the attempt ends, and the next one continues there from the prompt and the tokens already sent, with the same
seed. It recomputes only the tokens generated after the copy, in one step, which is faster than copying
their open block.

**Answers that have grown are copied** if the router is configured so. When a worker dies, the next attempt
of an answer uses the blocks on the worker that has the copy, like any cached block, and recomputes only the
tokens generated after the last copy. Without copies, it recomputes all tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter

from quire.protos import worker_pb2
from quire.services.router.execution.attempt import Attempt, OnParts
from quire.services.router.execution.worker_calls import NextWorker
from quire.services.router.migration.block_copies import copy_blocks, num_sealed_blocks
from quire.services.router.outputs.output import OutputAssembler
from quire.services.router.workers.worker import Worker, can_adapt
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.background import Spawn
from quire.services.server.log import EventLogger

MAX_UNDER_WAY = 4
"""Maximum number of requests whose answers are copied at the same time."""
INTERVAL_TOKENS = 256
"""New tokens of an answer after which it is copied again; shorter answers are never copied."""
GROWN_SECONDS = 2.0
"""Time limit for copying an answer that has grown, including the wait for room in the other worker's pool."""
MOVE_SECONDS = 5.0
"""Time limit of a copy of an answer that moves."""
MAX_COPIES = 3
"""Maximum number of copies for a move: each one adds the blocks that were filled during the previous one."""
MAX_MISSING_BLOCKS = 16
"""An answer that would have to recompute more blocks than this is not moved."""

_log = EventLogger("router")


class CopyMetrics:
    """Counts the copies, the copied blocks, and which answers of draining workers moved or stayed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.moves = Counter(
            "quire_moves_total",
            "Attempts on draining workers that moved, or stayed because blocks were not copied.",
            ["result"],
            registry=registry,
        )
        self.copies = Counter(
            "quire_answer_copies_total",
            "Copies of running answers to another worker, by how they ended.",
            ["result"],
            registry=registry,
        )
        self.blocks = Counter(
            "quire_answer_copy_blocks_total", "Blocks of running answers that were copied.", registry=registry
        )
        for result in ("moved", "stayed"):
            self.moves.labels(result)
        for result in ("ok", "busy", "failed"):
            self.copies.labels(result)


@dataclass(eq=False, slots=True)
class _Followed:
    """An attempt, and the state of the copies and the move of its answers.

    Attributes:
        next_copy: number of tokens from which the answers are copied again.
        is_copied: whether a copy is running because they have grown.
    """

    attempt: Attempt
    next_copy: int
    is_copied: bool = False
    is_moving: bool = False
    has_stayed: bool = False


class _Copied(NamedTuple):
    """Numbers of an answer's full blocks that the target of its move has and lacks."""

    num_held: int
    num_missing: int


class Copies:
    """Tracks the attempts on each decode worker, and copies their answers.

    The answers of a beam search, and those with a KV budget, are neither copied nor moved: they depend on
    more than their prompt, their tokens and their seed.

    Args:
        copies_grown: whether answers are copied as they grow.
    """

    def __init__(self, workers: WorkerSet, spawn: Spawn, metrics: CopyMetrics, *, copies_grown: bool) -> None:
        self._workers = workers
        self._spawn = spawn
        self._metrics = metrics
        self._copies_grown = copies_grown
        self._running: defaultdict[Worker, set[_Followed]] = defaultdict(set)
        self._slots = asyncio.Semaphore(MAX_UNDER_WAY)
        self._coming: Tally[Worker] = Tally()
        """Tokens of the answers that are moving to each worker."""
        workers.call_on_drain(self._start_moves)
        workers.call_on_return(self._start_all_moves)

    @contextmanager
    def follow(self, attempt: Attempt) -> Iterator[OnParts | None]:
        """Copy the answers of an attempt when there is a reason, until the context ends."""
        group, worker = attempt.group, attempt.decode
        if group.is_beam_search or group.params.kv_budget_tokens is not None:
            yield None
            return
        followed = _Followed(attempt, group.num_tokens + INTERVAL_TOKENS)
        self._running[worker].add(followed)
        if worker.health.is_draining:
            self._start_moves(worker)
        try:
            yield partial(self._start_copy, followed) if self._copies_grown else None
        finally:
            self._running[worker].discard(followed)
            if not self._running[worker]:
                del self._running[worker]

    async def _copy(
        self,
        attempt: Attempt,
        target: Worker,
        answer: OutputAssembler,
        *,
        time: worker_pb2.CopyTime,
        seconds: float,
    ) -> worker_pb2.PullSummary:
        token_ids = attempt.group.prompt_token_ids + answer.token_ids
        pulled = await copy_blocks(
            attempt.decode, target, token_ids, attempt.scope, time=time, seconds=seconds
        )
        self._metrics.copies.labels(pulled.failure or "ok").inc()
        self._metrics.blocks.inc(pulled.num_blocks)
        return pulled

    # --- answers that have grown --------------------------------------------------------------------------

    def _start_copy(self, followed: _Followed) -> None:
        """Copy the answers again once they have grown by ``INTERVAL_TOKENS``, if a slot is free."""
        group = followed.attempt.group
        num_tokens = group.num_tokens
        if num_tokens < followed.next_copy or followed.is_copied or group.is_finished or self._slots.locked():
            return
        if (target := self._place(followed.attempt)) is not None:
            followed.is_copied = True
            followed.next_copy = num_tokens + INTERVAL_TOKENS
            self._spawn(self._copy_grown(followed, target))

    async def _copy_grown(self, followed: _Followed, target: Worker) -> None:
        time = worker_pb2.COPY_TIME_ROOM
        try:
            async with self._slots:
                for answer in followed.attempt.group.answers:
                    await self._copy(followed.attempt, target, answer, time=time, seconds=GROWN_SECONDS)
        finally:
            followed.is_copied = False

    def _place(self, attempt: Attempt) -> Worker | None:
        """Return the prefill worker, which has the prompt already, or another one by rendezvous hashing.

        Rendezvous hashing (Thaler and Ravishankar, 1998) gives an answer the same place each time while the
        workers are the same, and divides the answers of a worker among all others.
        """
        prefill, key = attempt.prefill, attempt.group.sequence_id
        if prefill is not None and prefill.can_serve:
            return prefill
        decode, serving = attempt.decode, self._workers.serving
        others = [
            each for each in serving("decode") if each is not decode and each.revision == decode.revision
        ]
        return max(
            others or [each for each in serving("prefill") if each.revision == decode.revision],
            key=lambda worker: hashlib.sha256(f"{key} {worker.worker_id}".encode()).digest(),
            default=None,
        )

    # --- answers on a worker that drains ------------------------------------------------------------------

    def _start_all_moves(self) -> None:
        """Retry the moves, because another worker has joined or accepts requests again."""
        for worker in [worker for worker in self._running if worker.health.is_draining]:
            self._start_moves(worker)

    def _start_moves(self, worker: Worker) -> None:
        for followed in self._running.get(worker, ()):
            if not (followed.is_moving or followed.has_stayed):
                followed.is_moving = True
                self._spawn(self._move(followed))

    async def _move(self, followed: _Followed) -> None:
        attempt, group = followed.attempt, followed.attempt.group
        try:
            async with self._slots:
                target = self._target(attempt)
                if target is None or not self._must_move(followed):
                    return
                copied = await self._copy_to_move(attempt, target)
        finally:
            followed.is_moving = False
        # Meanwhile the attempt may have ended, or the operator may have ended the draining.
        if not self._must_move(followed):
            return
        has_begun = any(answer.token_ids for answer in group.answers)
        followed.has_stayed = has_begun and max(each.num_missing for each in copied) > MAX_MISSING_BLOCKS
        result = "stayed" if followed.has_stayed else "moved"
        self._metrics.moves.labels(result).inc()
        _log.info(
            f"answer_{result}",
            **group.names,
            worker=attempt.decode.worker_id,
            to=target.worker_id,
            missing_blocks=sum(each.num_missing for each in copied),
        )
        if not followed.has_stayed:
            num_held = min(each.num_held for each in copied)
            attempt.move(NextWorker(target, num_held * target.info.layout.block_size))

    def _must_move(self, followed: _Followed) -> bool:
        """Return whether the attempt still runs on a worker that drains."""
        worker = followed.attempt.decode
        return worker.health.is_draining and followed in self._running.get(worker, ())

    def _target(self, attempt: Attempt) -> Worker | None:
        """Return the decode worker with the most room, or None if no other suitable one accepts requests.

        A worker of another revision would compute other bits, so it gets no answer, nor does one without the
        adapter.
        """
        draining, adapter = attempt.decode, attempt.scope.adapter
        others = (each for each in self._workers.serving("decode") if each is not draining)
        serving = [w for w in others if w.revision == draining.revision and can_adapt(w, adapter)]
        healthy = [worker for worker in serving if not worker.health.is_unhealthy]
        return min(healthy or serving, key=self._share_in_use, default=None)

    def _share_in_use(self, worker: Worker) -> float:
        resident = worker.resident_tokens + worker.load_of_others.resident_tokens + self._coming[worker]
        return resident / max(1, worker.info.num_blocks)

    async def _copy_to_move(self, attempt: Attempt, target: Worker) -> list[_Copied]:
        """Copy the full blocks of all answers of an attempt, one answer after the other."""
        group = attempt.group
        num_tokens = sum(len(group.prompt_token_ids + each.token_ids) for each in group.answers)
        self._coming[target] += num_tokens
        try:
            return [await self._copy_until_full(attempt, target, each) for each in group.answers]
        finally:
            self._coming[target] -= num_tokens

    async def _copy_until_full(self, attempt: Attempt, target: Worker, answer: OutputAssembler) -> _Copied:
        """Copy the full blocks of an answer, and repeat for those that were filled meanwhile."""
        num_prompt_tokens, block_size = len(attempt.group.prompt_token_ids), target.info.layout.block_size
        time = worker_pb2.COPY_TIME_NOW
        result = _Copied(0, 0)
        for _ in range(MAX_COPIES):
            pulled = await self._copy(attempt, target, answer, time=time, seconds=MOVE_SECONDS)
            num_held = pulled.num_held_blocks + pulled.num_blocks
            num_sealed = num_sealed_blocks(num_prompt_tokens + len(answer.token_ids), block_size)
            result = _Copied(num_held, max(0, num_sealed - num_held))
            if not result.num_missing or not pulled.num_blocks:
                break
        return result
