"""Lets features of the router follow each attempt, without the attempt knowing these features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from quire.protos import worker_pb2
from quire.routing.placement import Placement
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.router.workers.worker import Worker
from quire.services.router.workers.worker_set import WorkerSet


class Plan(NamedTuple):
    """The workers of an attempt; without a prefill worker, the decode worker computes the prompt."""

    decode: Worker
    prefill: Worker | None
    placement: Placement
    """The planner's reasons for these workers, and its estimates."""
    pull_from: worker_pb2.PullSource | None = None
    """Peer from which the worker that computes the prompt first copies blocks; None: no pull."""


class NextWorker(NamedTuple):
    """The decode worker that an answer moves to, and how many of its leading tokens are cached there."""

    worker: Worker
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """An attempt, as its followers see it.

    Attributes:
        plan: its workers.
        group: its answers, which grow during the attempt.
        scope: which requests may share its blocks.
        move: ends the attempt once its received outputs were passed on; the next one runs on this worker.
    """

    plan: Plan
    group: AnswerGroup
    scope: worker_pb2.CacheScope
    move: Callable[[NextWorker], None]


OnParts = Callable[[], None]
"""Called each time answers of the attempt have grown."""
Follower = Callable[[RunningAttempt], AbstractContextManager[OnParts | None]]
"""Begins to follow an attempt, until its context ends."""


@contextmanager
def followed(followers: Iterable[Follower], attempt: RunningAttempt) -> Iterator[OnParts]:
    """Let all followers follow an attempt until the context ends; call the yielded function when it grows."""
    with ExitStack() as stack:
        heard = [stack.enter_context(follow(attempt)) for follow in followers]
        listeners = [on_parts for on_parts in heard if on_parts is not None]

        def on_parts() -> None:
            for listener in listeners:
                listener()

        yield on_parts


@contextmanager
def follow_load(workers: WorkerSet, attempt: RunningAttempt) -> Iterator[OnParts]:
    """Count the tokens of an attempt on its workers; once an answer grows, its prompt has been computed."""
    decode, prefill, placement, _ = attempt.plan
    resident, pending = placement.resident_tokens, placement.pending_tokens
    if prefill is None:
        with workers.dispatched(decode, pending_tokens=pending, resident_tokens=resident) as computed:
            yield computed
        return
    with (
        workers.dispatched(decode, resident_tokens=resident),
        workers.dispatched(prefill, pending_tokens=pending) as computed,
    ):
        yield computed
