"""Which workers serve a request: pure functions over what the router knows.

Costs are in prompt tokens. A prefill worker's cost is the tokens that must be computed before this request's
first token: those it has promised to others, and those of this prompt that it holds no blocks for. A decode
worker's is the tokens of KV it keeps for others and must newly keep for this one; overlap with blocks that it
holds saves the transfer, but not the memory: it counts half.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

TIE_SHARE = 0.02
"""Costs closer than this share are equal: the order of the key decides, so that a prefix finds its worker."""

AFFINITY_BLOCKS = 16
"""So many first blocks decide which worker a prompt prefers, all else equal."""

MIN_PULLED_BLOCKS = 4
"""Fewer blocks are computed: a pull has a cost of its own."""

PULL_ROUND_TRIP_SECONDS = 0.005
"""What a pull takes besides the bytes."""


class Candidate(NamedTuple):
    """A worker that could serve the request."""

    worker_id: str
    cached_tokens: int
    """Prompt tokens that it holds blocks for, by the index."""
    load_tokens: int
    """Tokens that the router has in flight there: to be computed (prefill) or kept (decode)."""
    is_shunned: bool = False
    """It failed a moment ago, or in this request."""


class Choice(NamedTuple):
    """A chosen worker and why."""

    worker_id: str
    cached_tokens: int
    reason: str
    """``only`` candidate, ``prefix`` it holds, least ``load``, or ``tie`` broken by the key's order."""


class Peer(NamedTuple):
    """A worker whose blocks could be copied."""

    worker_id: str
    cached_tokens: int
    """Prompt tokens that it holds blocks for, by the index."""
    bytes_per_second: float


class PullChoice(NamedTuple):
    """Whose blocks to copy, and what that and computing them would take."""

    worker_id: str
    num_blocks: int
    """Leading blocks of the prompt, those that need no copy included."""
    pull_seconds: float
    compute_seconds: float


def choose_pull(
    own_tokens: int, peers: Sequence[Peer], *, block_size: int, block_bytes: int, tokens_per_second: float
) -> PullChoice | None:
    """Return the pull that saves most time over computing the same tokens, or None where none saves any.

    Args:
        own_tokens: prompt tokens that the worker holds blocks for itself.
        tokens_per_second: how fast it computes a prompt.
    """
    own_blocks = own_tokens // block_size
    pulls = []
    for peer in peers:
        num_blocks = peer.cached_tokens // block_size
        num_missing = num_blocks - own_blocks
        pull_seconds = PULL_ROUND_TRIP_SECONDS + num_missing * block_bytes / peer.bytes_per_second
        compute_seconds = num_missing * block_size / tokens_per_second
        if num_missing >= MIN_PULLED_BLOCKS and pull_seconds < compute_seconds:
            pulls.append(PullChoice(peer.worker_id, num_blocks, pull_seconds, compute_seconds))
    return max(pulls, key=lambda pull: pull.compute_seconds - pull.pull_seconds, default=None)


def choose_prefill(candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> Choice | None:
    """Return the prefill worker that draws the first token soonest, or None where none is well.

    A shunned one is never taken: decode workers can do without.
    """
    return _choose(
        [c for c in candidates if not c.is_shunned],
        key,
        lambda c: c.load_tokens + num_tokens - c.cached_tokens,
    )


def choose_decode(candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> Choice | None:
    """Return the decode worker with the most room for the sequence, or None where there is none.

    A shunned one is the last resort.
    """
    return _choose(
        [c for c in candidates if not c.is_shunned] or candidates,
        key,
        lambda c: c.load_tokens + num_tokens - c.cached_tokens / 2,
    )


def affinity_key(token_ids: Sequence[int], block_size: int) -> bytes:
    """Return a key that prompts with the same first blocks share."""
    first = token_ids[: AFFINITY_BLOCKS * block_size]
    return hashlib.blake2b(struct.pack(f"<{len(first)}I", *first), digest_size=16).digest()


def needs_prefill_worker(decode: Choice, num_tokens: int, local_prefill_tokens: int) -> bool:
    """Return whether the part of the prompt that the decode worker lacks is worth a transfer."""
    return num_tokens - decode.cached_tokens > local_prefill_tokens


def _choose(
    candidates: Sequence[Candidate], key: bytes, cost_of: Callable[[Candidate], float]
) -> Choice | None:
    if not candidates:
        return None
    cheapest = min(cost_of(c) for c in candidates)
    equal = [c for c in candidates if cost_of(c) <= cheapest * (1 + TIE_SHARE)]
    best = max(equal, key=lambda c: _rendezvous(key, c.worker_id))
    return Choice(best.worker_id, best.cached_tokens, _reason(best, equal, candidates))


def _reason(best: Candidate, equal: Sequence[Candidate], candidates: Sequence[Candidate]) -> str:
    if len(candidates) == 1:
        return "only"
    if best.cached_tokens > min(c.cached_tokens for c in candidates):
        return "prefix"
    return "load" if len(equal) < len(candidates) else "tie"


def _rendezvous(key: bytes, worker_id: str) -> bytes:
    """Return a rank that is stable for a key and moves few keys when workers come and go."""
    return hashlib.blake2b(worker_id.encode(), key=key[:64], digest_size=8).digest()
