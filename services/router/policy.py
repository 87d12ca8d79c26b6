"""Which workers serve a request: pure functions over what the router knows.

A prefill worker's cost is the time until it can draw the first token, by measured rates::

    seconds = tokens owed to others / rate                    its queue
            + round trip + bytes pulled / peer's rate         if that is sooner than computing these tokens
            + tokens neither held nor pulled / rate

A decode worker's cost is the share of its blocks that are taken once the request is there. Blocks that it
holds already save a transfer, but not the memory: they count half.

``random`` and ``load`` choose without regard to prefixes; ``approx`` by what this router has sent somewhere;
``precise`` by what the index says, and for the last seconds by what was sent. The rest is the same for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from random import Random
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

TIE_SHARE = 0.05
"""Costs closer than this share are equal, for rates are no more exact."""
TIE_SECONDS = 0.0005
"""Nor are times closer than this different."""

AFFINITY_BLOCKS = 16
"""So many first blocks decide which worker a prompt prefers, all else equal."""

MIN_PULLED_BLOCKS = 4
"""Fewer blocks are computed: a pull has a cost of its own."""
PULL_ROUND_TRIP_SECONDS = 0.005
"""What a pull takes besides the bytes."""
MAX_PEERS = 4
"""Peers to weigh for a pull, those that hold most."""

IMBALANCE_RATIO = 3.0
IMBALANCE_SECONDS = 2.0
"""A worker whose queue is longer than the shortest by both is passed over, whatever it holds: a wrong rate or
a stale index must not turn a popular prefix into a jam. Others can pull its blocks."""

OVERLAP_SHARE = 0.5
"""Of a block that a decode worker holds already, counted as room."""


class Policy(StrEnum):
    """What decides who serves a request."""

    RANDOM = "random"
    LOAD = "load"
    APPROX = "approx"
    PRECISE = "precise"

    @property
    def knows_prefixes(self) -> bool:
        """Whether what workers hold matters."""
        return self in (Policy.APPROX, Policy.PRECISE)


class Pulls(StrEnum):
    """When a worker copies blocks that a peer holds."""

    NEVER = "never"
    MEASURED = "measured"
    ALWAYS = "always"


class Candidate(NamedTuple):
    """A worker that could serve the request."""

    worker_id: str
    cached_tokens: int = 0
    """Prompt tokens that it is believed to hold blocks for."""
    owed_tokens: int = 0
    """Tokens that it has to compute for others before their first tokens."""
    kept_tokens: int = 0
    """Tokens whose blocks it keeps for others."""
    capacity_tokens: int = 1
    """Tokens that its pool holds."""
    tokens_per_second: float = 1.0
    """How fast it computes prompts."""
    is_shunned: bool = False
    """It failed a moment ago, or in this request."""


class Peer(NamedTuple):
    """A worker whose blocks could be copied."""

    worker_id: str
    cached_tokens: int
    """Prompt tokens that it holds blocks for, by the index."""
    bytes_per_second: float


class Blocks(NamedTuple):
    """Size of a block."""

    tokens: int
    bytes: int


class PullChoice(NamedTuple):
    """Whose blocks to copy, and what that and computing them would take."""

    worker_id: str
    num_blocks: int
    """Leading blocks of the prompt, those that need no copy included."""
    pull_seconds: float
    compute_seconds: float


class Estimate(NamedTuple):
    """What a worker would need until the first token."""

    candidate: Candidate
    queue_seconds: float
    pull: PullChoice | None
    compute_seconds: float
    """For what is neither held nor pulled."""
    cached_tokens: int
    """Held or pulled."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.queue_seconds + (self.pull.pull_seconds if self.pull else 0.0) + self.compute_seconds


class PrefillChoice(NamedTuple):
    """A chosen prefill worker and why."""

    estimate: Estimate
    reason: str
    """``only`` candidate; ``prefix`` it holds; ``pull``: it is soonest because it can copy; least ``load``;
    ``tie``, broken by the key's order; ``imbalance``: a holder's queue was too long; ``random``."""

    @property
    def worker_id(self) -> str:
        """Who."""
        return self.estimate.candidate.worker_id


class DecodeChoice(NamedTuple):
    """A chosen decode worker and why: reasons as of a ``PrefillChoice``."""

    candidate: Candidate
    reason: str

    @property
    def worker_id(self) -> str:
        """Who."""
        return self.candidate.worker_id


def choose_pull(
    own_tokens: int, peers: Sequence[Peer], blocks: Blocks, tokens_per_second: float, pulls: Pulls
) -> PullChoice | None:
    """Return the pull that saves most time over computing the same tokens, or None where none is to be had.

    Args:
        own_tokens: prompt tokens that the worker holds blocks for itself.
        tokens_per_second: how fast it computes a prompt.
    """
    if pulls is Pulls.NEVER:
        return None
    min_blocks = 1 if pulls is Pulls.ALWAYS else MIN_PULLED_BLOCKS
    own_blocks = own_tokens // blocks.tokens
    choices = []
    for peer in peers:
        num_blocks = peer.cached_tokens // blocks.tokens
        num_missing = num_blocks - own_blocks
        pull_seconds = PULL_ROUND_TRIP_SECONDS + num_missing * blocks.bytes / peer.bytes_per_second
        compute_seconds = num_missing * blocks.tokens / tokens_per_second
        if num_missing >= min_blocks and (pulls is Pulls.ALWAYS or pull_seconds < compute_seconds):
            choices.append(PullChoice(peer.worker_id, num_blocks, pull_seconds, compute_seconds))
    if pulls is Pulls.ALWAYS:
        return max(choices, key=lambda pull: (pull.num_blocks, -pull.pull_seconds), default=None)
    return max(choices, key=lambda pull: pull.compute_seconds - pull.pull_seconds, default=None)


def best_peers(peers: Sequence[Peer]) -> list[Peer]:
    """Return the few peers that are worth weighing for a pull."""
    return sorted(peers, key=lambda p: (p.cached_tokens, p.bytes_per_second), reverse=True)[:MAX_PEERS]


def estimate(
    candidate: Candidate, num_tokens: int, peers: Sequence[Peer], blocks: Blocks, pulls: Pulls
) -> Estimate:
    """Return what a worker would need until the first token of a prompt."""
    rate = candidate.tokens_per_second
    # The last token is always computed, for its logits.
    own = min(candidate.cached_tokens, num_tokens - 1)
    others = [peer for peer in peers if peer.worker_id != candidate.worker_id]
    pull = choose_pull(own, others, blocks, rate, pulls)
    cached = min(pull.num_blocks * blocks.tokens, num_tokens - 1) if pull else own
    return Estimate(candidate, candidate.owed_tokens / rate, pull, (num_tokens - cached) / rate, cached)


def choose_prefill(
    policy: Policy, estimates: Sequence[Estimate], key: bytes, rng: Random
) -> PrefillChoice | None:
    """Return the prefill worker that draws the first token soonest, or None where none is well.

    A shunned one is never taken: decode workers can do without.
    """
    well = [each for each in estimates if not each.candidate.is_shunned]
    if not well:
        return None
    if len(well) == 1:
        return PrefillChoice(well[0], "only")
    if policy is Policy.RANDOM:
        return PrefillChoice(rng.choice(well), "random")
    if policy is Policy.LOAD:
        least = min(each.queue_seconds for each in well)
        equal = [each for each in well if each.queue_seconds <= _tied(least)]
        return PrefillChoice(rng.choice(equal), "load" if len(equal) < len(well) else "tie")
    balanced = _without_jams(well)
    best, ties = _cheapest(
        balanced, lambda e: e.seconds, _tied, lambda e: e.cached_tokens, lambda e: e.candidate.worker_id, key
    )
    if len(balanced) < len(well) and min(well, key=lambda e: e.seconds) not in balanced:
        return PrefillChoice(best, "imbalance")
    if best.pull is not None:
        return PrefillChoice(best, "pull")
    if best.cached_tokens > min(each.cached_tokens for each in well):
        return PrefillChoice(best, "prefix")
    return PrefillChoice(best, "load" if len(ties) < len(well) else "tie")


def choose_decode(
    policy: Policy, candidates: Sequence[Candidate], num_tokens: int, key: bytes, rng: Random
) -> DecodeChoice | None:
    """Return the decode worker with the most room for the sequence, or None where there is none.

    A shunned one is the last resort, and so is one without the blocks.
    """
    well = [c for c in candidates if not c.is_shunned] or list(candidates)
    roomy = [c for c in well if c.kept_tokens + num_tokens <= c.capacity_tokens] or well
    if not roomy:
        return None
    if len(roomy) == 1:
        return DecodeChoice(roomy[0], "only")
    if policy is Policy.RANDOM:
        return DecodeChoice(rng.choice(roomy), "random")

    def taken(candidate: Candidate) -> float:
        """Return the share of the pool's blocks that are taken once the request is there."""
        own = candidate.cached_tokens if policy.knows_prefixes else 0
        return (candidate.kept_tokens + num_tokens - own * OVERLAP_SHARE) / candidate.capacity_tokens

    best, equal = _cheapest(
        roomy,
        taken,
        lambda least: least * (1 + TIE_SHARE),
        lambda c: c.cached_tokens if policy.knows_prefixes else 0,
        lambda c: c.worker_id,
        key if policy.knows_prefixes else rng.randbytes(8),
    )
    if policy.knows_prefixes and best.cached_tokens > min(c.cached_tokens for c in roomy):
        return DecodeChoice(best, "prefix")
    return DecodeChoice(best, "load" if len(equal) < len(roomy) else "tie")


def is_local_sooner(
    local: Estimate, remote: Estimate, *, handoff_seconds: float, num_running: int, max_tokens: int
) -> bool:
    """Return whether the decode worker should compute the rest of the prompt itself.

    What it computes stalls the sequences that it decodes; their lost time counts as much as this request's.

    Args:
        handoff_seconds: what a prefill worker costs besides: the decode worker's promise of a place.
        num_running: sequences that the decode worker has.
        max_tokens: it computes no more than so many tokens.
    """
    num_computed = local.compute_seconds * local.candidate.tokens_per_second
    stalled_seconds = num_running * local.compute_seconds
    return num_computed <= max_tokens and local.seconds + stalled_seconds <= handoff_seconds + remote.seconds


def affinity_key(block_hashes: Sequence[bytes]) -> bytes:
    """Return a key that prompts with the same first blocks share."""
    return block_hashes[min(len(block_hashes), AFFINITY_BLOCKS) - 1] if block_hashes else b""


def _tied(least_seconds: float) -> float:
    return least_seconds * (1 + TIE_SHARE) + TIE_SECONDS


def _without_jams(estimates: Sequence[Estimate]) -> list[Estimate]:
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
    """Return the best of the cheapest, and all these: it holds most, and is first in the key's order."""
    costs = [cost_of(item) for item in items]
    limit = tied(min(costs))
    equal = [item for item, cost in zip(items, costs, strict=True) if cost <= limit]
    most = max(map(cached_of, equal))
    holders = [item for item in equal if cached_of(item) == most]
    return max(holders, key=lambda item: _rendezvous(key, name_of(item))), equal


def _rendezvous(key: bytes, worker_id: str) -> bytes:
    """Return a rank that is stable for a key and moves few keys when workers come and go."""
    return hashlib.blake2b(worker_id.encode(), key=key[:64], digest_size=8).digest()
