"""Synthetic requests: one workload shaped like production traffic, and simple ones that explain it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import count
from random import Random

from quire.simulator.trace import TRACE_BLOCK_TOKENS, TraceRequest


class Workload(StrEnum):
    """The kind of synthetic requests."""

    MOONCAKE = "mooncake"
    CHAT = "chat"
    SHARED = "shared"
    UNIQUE = "unique"


MOONCAKE_RATE = 23_608 / 3600
"""Requests per second in the published trace."""
MOONCAKE_OUTPUT_TOKENS = 182
"""Mean number of tokens of an answer in the published trace."""

_CONTINUED_SHARE = 0.5
"""Share of Mooncake's requests that continue an earlier one; with it, half of the tokens can be reused."""
_FIRST_TOKENS, _ADDED_TOKENS = 5000, 2200
"""Mean length of a first request, and mean length that a continuation adds; they give the trace's mean."""
_MAX_INPUT_TOKENS = 120_000
_OPEN_SESSIONS = 2000
_NUM_PREFIXES = 16

CHAT_TURNS = 4
CHAT_GAP_SECONDS = 10.0
"""Mean time between two turns of a chat."""


def make_requests(
    workload: Workload,
    num_requests: int,
    rate: float,
    seed: int,
    *,
    input_tokens: int = 1024,
    shared_tokens: int = 768,
    output_tokens: int = 64,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    chat_gap_seconds: float = CHAT_GAP_SECONDS,
) -> list[TraceRequest]:
    """Return requests with Poisson arrivals, ``rate`` per second on average.

    Args:
        input_tokens: tokens of a prompt, or that each turn of a chat adds; Mooncake has its own lengths.
        shared_tokens: tokens of a shared prefix.
        output_tokens: tokens of an answer; Mooncake has its own lengths.
        block_tokens: number of tokens that one block id represents.
    """
    rng = Random(f"{workload} {seed}")
    fresh = count(1)

    def blocks(num_tokens: int) -> list[int]:
        return [next(fresh) for _ in range(math.ceil(num_tokens / block_tokens))]

    makers: dict[Workload, Callable[[], Iterator[TraceRequest]]] = {
        Workload.MOONCAKE: lambda: _mooncake(rng, rate, blocks, block_tokens),
        Workload.CHAT: lambda: _chats(
            rng, rate, blocks, block_tokens, input_tokens, output_tokens, chat_gap_seconds
        ),
        Workload.SHARED: lambda: _shared(
            rng, rate, blocks, block_tokens, input_tokens, shared_tokens, output_tokens
        ),
        Workload.UNIQUE: lambda: _shared(rng, rate, blocks, block_tokens, input_tokens, 0, output_tokens),
    }
    requests = makers[workload]()
    return sorted((next(requests) for _ in range(num_requests)), key=lambda r: r.arrival_seconds)


Blocks = Callable[[int], list[int]]


def _arrivals(rng: Random, rate: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def _lognormal(rng: Random, mean: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))


def _extended(
    block_ids: list[int], old_tokens: int, new_tokens: int, blocks: Blocks, block_tokens: int
) -> list[int]:
    """Return the blocks of a longer input: full blocks are equal, and a partial block becomes another one."""
    num_full = old_tokens // block_tokens
    return block_ids[:num_full] + blocks(new_tokens - num_full * block_tokens)


def _mooncake(rng: Random, rate: float, blocks: Blocks, block_tokens: int) -> Iterator[TraceRequest]:
    """Yield requests, many of which continue an earlier request, more often a recent one than an old one."""
    system = blocks(1)
    sessions: deque[tuple[list[int], int]] = deque(maxlen=_OPEN_SESSIONS)
    for arrival in _arrivals(rng, rate):
        if sessions and rng.random() < _CONTINUED_SHARE:
            index = len(sessions) - 1 - min(len(sessions) - 1, int(rng.expovariate(1 / 300)))
            old_ids, old_tokens = sessions[index]
            num_tokens = min(_MAX_INPUT_TOKENS, old_tokens + _lognormal(rng, _ADDED_TOKENS, 1.0))
            ids = _extended(old_ids, old_tokens, num_tokens, blocks, block_tokens)
        else:
            num_tokens = min(_MAX_INPUT_TOKENS, block_tokens + _lognormal(rng, _FIRST_TOKENS, 1.2))
            ids = system + blocks(num_tokens - block_tokens)
        sessions.append((ids, num_tokens))
        yield TraceRequest(arrival, num_tokens, _lognormal(rng, MOONCAKE_OUTPUT_TOKENS, 0.9), tuple(ids))


def _chats(
    rng: Random,
    rate: float,
    blocks: Blocks,
    block_tokens: int,
    turn_tokens: int,
    output_tokens: int,
    gap_seconds: float,
) -> Iterator[TraceRequest]:
    """Yield the turns of chats; the prompt of each turn contains all turns before it."""
    for begin in _arrivals(rng, rate / CHAT_TURNS):
        ids: list[int] = []
        arrival, num_tokens = begin, 0
        for _ in range(CHAT_TURNS):
            longer = num_tokens + turn_tokens
            ids = _extended(ids, num_tokens, longer, blocks, block_tokens)
            num_tokens = longer
            yield TraceRequest(arrival, num_tokens, output_tokens, tuple(ids))
            arrival += rng.expovariate(1 / gap_seconds)


def _shared(
    rng: Random,
    rate: float,
    blocks: Blocks,
    block_tokens: int,
    input_tokens: int,
    shared_tokens: int,
    output_tokens: int,
) -> Iterator[TraceRequest]:
    """Yield prompts that begin with one of a few prefixes."""
    prefixes = [blocks(shared_tokens) for _ in range(_NUM_PREFIXES)]
    for arrival in _arrivals(rng, rate):
        ids = _extended(rng.choice(prefixes), shared_tokens, input_tokens, blocks, block_tokens)
        yield TraceRequest(arrival, input_tokens, output_tokens, tuple(ids))
