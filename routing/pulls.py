"""Decides whether a worker copies blocks that a peer has cached, instead of computing them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

MIN_PULLED_BLOCKS = 4
"""Minimum number of blocks for a pull; fewer are computed, because a pull has a fixed cost."""
PULL_ROUND_TRIP_SECONDS = 0.005
"""Fixed time of a pull, in addition to the time for its bytes."""
MAX_PEERS = 4
"""Number of peers considered for a pull: those with the most cached tokens."""


class Pulls(StrEnum):
    """The condition for copying blocks that a peer has cached, instead of computing them.

    ``measured`` copies where that is expected to be sooner.
    """

    NEVER = "never"
    MEASURED = "measured"


class Blocks(NamedTuple):
    """Size of a block, in tokens and in bytes."""

    tokens: int
    bytes: int


class Peer(NamedTuple):
    """A worker whose blocks another worker could copy."""

    worker_id: str
    num_blocks: int
    """Leading blocks of the prompt that it has cached, according to the index."""
    bytes_per_second: float


def choose_pull(
    own_tokens: int, peers: Sequence[Peer], blocks: Blocks, tokens_per_second: float, pulls: Pulls
) -> tuple[Peer, float] | None:
    """Return the peer whose blocks save the most time, and the expected seconds of the pull.

    Return None if computing all tokens is faster than any pull.

    Args:
        own_tokens: prompt tokens that the worker itself has cached.
        tokens_per_second: rate at which the worker computes a prompt.
    """
    if pulls is Pulls.NEVER:
        return None
    own_blocks = own_tokens // blocks.tokens
    best, most_saved = None, 0.0
    for peer in peers:
        num_missing = peer.num_blocks - own_blocks
        pull_seconds = PULL_ROUND_TRIP_SECONDS + num_missing * blocks.bytes / peer.bytes_per_second
        saved = num_missing * blocks.tokens / tokens_per_second - pull_seconds
        if num_missing >= MIN_PULLED_BLOCKS and saved > most_saved:
            best, most_saved = (peer, pull_seconds), saved
    return best


def best_peers(peers: Sequence[Peer]) -> list[Peer]:
    """Return the ``MAX_PEERS`` peers with the most cached blocks, the faster ones first among equals."""
    return sorted(peers, key=lambda p: (p.num_blocks, p.bytes_per_second), reverse=True)[:MAX_PEERS]
