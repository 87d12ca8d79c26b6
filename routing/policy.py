"""Chooses the workers that serve a request: pure functions over the router's knowledge of the workers.

The cost of a prefill worker is the time until it can sample the first token, computed from measured rates::

    seconds = pending prefill tokens of others / rate         its queue
            + round trip + bytes pulled / peer's rate         if that is sooner than computing these tokens
            + tokens neither cached nor pulled / rate

The cost of a decode worker is the share of its blocks in use once it has the request and an answer of average
length. Blocks that it has already cached save a transfer, but no memory: they count half.

``load`` ignores prefixes. ``precise`` uses the index and, for the last seconds, the prompts that this router
has sent to each worker. Both share the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from random import Random
from typing import Literal, NamedTuple, TypeVar

from quire.routing.pulls import Blocks, Peer, Pulls, choose_pull

Item = TypeVar("Item")

TIE_SHARE = 0.05
"""Costs within this share of the least one count as equal, because rates are not measured more exactly."""
TIE_SECONDS = 0.0005
"""Times within this distance of the least time also count as equal."""

AFFINITY_BLOCKS = 16
"""Number of leading blocks that decide which worker a prompt prefers when costs are equal."""

IMBALANCE_RATIO = 3.0
IMBALANCE_SECONDS = 2.0
"""A worker is passed over if its queue is longer than both this ratio times the shortest queue and the
shortest queue plus these seconds, no matter what it has cached. Otherwise a wrong rate or a stale index could
send all requests with a popular prefix to one overloaded worker. Other workers can pull its blocks."""

OVERLAP_SHARE = 0.5
"""Share of a block that counts as free room where a decode worker has that block cached already."""


class Policy(StrEnum):
    """A policy for the choice of the workers; the module's docstring describes each."""

    LOAD = "load"
    PRECISE = "precise"


Reason = Literal["only", "prefix", "pull", "load", "tie", "imbalance"]
"""Why a worker was chosen. ``only``: there was no other candidate; ``prefix``: it has more of the prompt
cached; ``pull``: it is soonest because it can copy blocks; ``load``: it has the least load; ``tie``: the
key's order decided; ``imbalance``: the queue of the soonest worker was too long."""


class CandidateWorker(NamedTuple):
    """A worker that could serve the request.

    The planner adds ``cached_tokens`` and ``tokens_per_second`` to what its caller knows.
    """

    worker_id: str
    cached_tokens: int = 0
    """Prompt tokens that the worker probably has cached."""
    pending_tokens: int = 0
    """Pending prefill tokens: those that it has to compute for the first tokens of other requests."""
    resident_tokens: int = 0
    """Resident tokens: those of other requests that it keeps blocks for, with the expected answers."""
    capacity_tokens: int = 1
    """Tokens that fit in its pool."""
    tokens_per_second: float = 1.0
    """Rate at which it computes prompts."""
    num_requests: int = 0
    """Requests in flight."""
    is_unhealthy: bool = False
    """Whether it is unhealthy: it failed recently or in this request, or it may be unable to serve."""
    revision: str = ""
    """Only workers of one revision work together."""


class Estimate(NamedTuple):
    """Expected time until a worker's first token."""

    candidate: CandidateWorker
    queue_seconds: float
    peer: Peer | None
    """Where the worker first copies blocks from; None: nowhere."""
    pull_seconds: float
    compute_seconds: float
    """Time to compute the tokens that are neither cached nor pulled."""
    cached_tokens: int
    """Prompt tokens that need no computation, because they are cached or pulled."""

    @property
    def seconds(self) -> float:
        """Total time until the first token: the queue, the pull and the computation."""
        return self.queue_seconds + self.pull_seconds + self.compute_seconds


def estimate(
    candidate: CandidateWorker, num_tokens: int, peers: Sequence[Peer], blocks: Blocks, pulls: Pulls
) -> Estimate:
    """Return the expected time until a worker samples the first token of a prompt of ``num_tokens``."""
    rate = candidate.tokens_per_second
    # The last token is always computed, because its logits are needed.
    own = min(candidate.cached_tokens, num_tokens - 1)
    others = [peer for peer in peers if peer.worker_id != candidate.worker_id]
    peer, seconds = choose_pull(own, others, blocks, rate, pulls) or (None, 0.0)
    cached = min(peer.num_blocks * blocks.tokens, num_tokens - 1) if peer else own
    queue_seconds, compute_seconds = candidate.pending_tokens / rate, (num_tokens - cached) / rate
    return Estimate(candidate, queue_seconds, peer, seconds, compute_seconds, cached)


def choose_prefill(
    policy: Policy, estimates: Sequence[Estimate], key: bytes, rng: Random
) -> tuple[Estimate, Reason] | None:
    """Return the prefill worker that samples the first token soonest and why, or None if none is healthy.

    An unhealthy prefill worker is never chosen, because decode workers can compute prompts themselves.
    """
    healthy = [each for each in estimates if not each.candidate.is_unhealthy]
    if not healthy:
        return None
    if len(healthy) == 1:
        return healthy[0], "only"
    if policy is Policy.LOAD:
        least = min(each.queue_seconds for each in healthy)
        equal = [each for each in healthy if each.queue_seconds <= _tied(least)]
        return rng.choice(equal), "load" if len(equal) < len(healthy) else "tie"
    balanced = without_jams(healthy)
    best, ties = _cheapest(
        balanced, lambda e: e.seconds, _tied, lambda e: e.cached_tokens, lambda e: e.candidate.worker_id, key
    )
    if len(balanced) < len(healthy) and min(healthy, key=lambda e: e.seconds) not in balanced:
        return best, "imbalance"
    if best.peer is not None:
        return best, "pull"
    if best.cached_tokens > min(each.cached_tokens for each in healthy):
        return best, "prefix"
    return best, "load" if len(ties) < len(healthy) else "tie"


def choose_decode(
    policy: Policy, candidates: Sequence[CandidateWorker], num_tokens: int, key: bytes, rng: Random
) -> tuple[CandidateWorker, Reason] | None:
    """Return the decode worker with the most room for the request and why, or None without candidates.

    An unhealthy worker is chosen only if all are unhealthy, and one without enough free blocks only if no
    worker has enough.

    Args:
        num_tokens: tokens of the prompt and of the expected answers.
    """
    healthy = [c for c in candidates if not c.is_unhealthy] or list(candidates)
    with_room = [c for c in healthy if c.resident_tokens + num_tokens <= c.capacity_tokens] or healthy
    if not with_room:
        return None
    if len(with_room) == 1:
        return with_room[0], "only"
    knows_prefixes = policy is Policy.PRECISE

    def taken(candidate: CandidateWorker) -> float:
        """Return the share of the pool's blocks that are in use once the worker has the request."""
        own = candidate.cached_tokens if knows_prefixes else 0
        return (candidate.resident_tokens + num_tokens - own * OVERLAP_SHARE) / candidate.capacity_tokens

    best, equal = _cheapest(
        with_room,
        taken,
        lambda least: least * (1 + TIE_SHARE),
        lambda c: c.cached_tokens if knows_prefixes else 0,
        lambda c: c.worker_id,
        key if knows_prefixes else rng.randbytes(8),
    )
    if knows_prefixes and best.cached_tokens > min(c.cached_tokens for c in with_room):
        return best, "prefix"
    return best, "load" if len(equal) < len(with_room) else "tie"


def is_local_sooner(
    local: Estimate, remote: Estimate, *, handoff_seconds: float, num_running: int, max_tokens: int
) -> bool:
    """Return whether the decode worker should compute the rest of the prompt itself.

    The computation stalls the sequences that it decodes. Their lost time counts as much as this request's.

    Args:
        handoff_seconds: extra time that a prefill worker costs: the decode worker's promise of a place.
        num_running: requests that the decode worker is running.
        max_tokens: maximum number of prompt tokens that it may compute.
    """
    num_computed = local.compute_seconds * local.candidate.tokens_per_second
    stalled_seconds = num_running * local.compute_seconds
    return num_computed <= max_tokens and local.seconds + stalled_seconds <= handoff_seconds + remote.seconds


def affinity_key(block_hashes: Sequence[bytes]) -> bytes:
    """Return a key that prompts with the same leading blocks share; it is empty if there are no blocks."""
    return block_hashes[min(len(block_hashes), AFFINITY_BLOCKS) - 1] if block_hashes else b""


def _tied(least_seconds: float) -> float:
    return least_seconds * (1 + TIE_SHARE) + TIE_SECONDS


def without_jams(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates of the workers that are not passed over because of their queues."""
    least = min(each.queue_seconds for each in estimates)
    longest = max(IMBALANCE_RATIO * least, least + IMBALANCE_SECONDS)
    return [each for each in estimates if each.queue_seconds <= longest]


def _cheapest(
    items: Sequence[Item],
    cost_of: Callable[[Item], float],
    tied: Callable[[float], float],
    cached_of: Callable[[Item], int],
    name_of: Callable[[Item], str],
    key: bytes,
) -> tuple[Item, Sequence[Item]]:
    """Return the best of the cheapest items, and all of the cheapest items.

    The best item has the most cached tokens; if several do, it is the first in the key's order.
    """
    costs = [cost_of(item) for item in items]
    limit = tied(min(costs))
    equal = [item for item, cost in zip(items, costs, strict=True) if cost <= limit]
    most = max(map(cached_of, equal))
    holders = [item for item in equal if cached_of(item) == most]
    return max(holders, key=lambda item: _rendezvous(key, name_of(item))), equal


def _rendezvous(key: bytes, worker_id: str) -> bytes:
    """Return a worker's rank for a key; when workers join or leave, few keys change their first worker."""
    return hashlib.blake2b(worker_id.encode(), key=key[:64], digest_size=8).digest()


def receiving(prefill: Collection[str], decode: Sequence[str]) -> list[str]:
    """Return the revisions of the served model that receive requests: those with workers of both roles.

    A revision is what prefill and decode workers must share: weights, block layout, arithmetic.

    If there is none, the decode workers of one revision compute prompts too, or prefill workers serve alone
    what needs no decode worker.

    Args:
        prefill: revisions of the prefill workers that can serve.
        decode: revisions of the decode workers that can serve, the first joined first.
    """
    complete = [each for each in dict.fromkeys(decode) if each in prefill]
    return complete or [*decode[:1]] or [*dict.fromkeys(prefill)][:1]
