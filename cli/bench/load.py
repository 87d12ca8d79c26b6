"""Sends requests at a given rate or concurrency, and records their latencies and outcomes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import TypeAlias, cast

from quire.cli.bench.summary import NOT_SENT, OK, RequestRecord
from quire.cli.bench.workload import BenchRequest
from quire.client import AsyncClient, QuireError

Send: TypeAlias = Callable[[BenchRequest, float], Awaitable[None]]
"""Sends a request that is due at a time of ``time.perf_counter``, and records its outcome."""


def poisson_offsets(rate: float, num_requests: int, rng: random.Random) -> list[float]:
    """Return when to send each request, in seconds from the start: Poisson arrivals, ``rate`` per second."""
    return list(accumulate(rng.expovariate(rate) for _ in range(num_requests)))


async def send(client: AsyncClient, request: BenchRequest, due_seconds: float) -> RequestRecord:
    """Send a request and return its record; a failed request has a record too."""
    arrivals: list[float] = []
    token_ids: list[int] = []
    status, usage = OK, None
    try:
        async with aclosing(client.stream(request.prompt, **request.options)) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    arrivals.append(time.perf_counter())
                    token_ids += delta.token_ids
                usage = delta.usage or usage
    except QuireError as error:
        status = error.code.name
    return RequestRecord(
        status=status,
        start_seconds=due_seconds,
        end_seconds=time.perf_counter(),
        arrivals_seconds=tuple(arrivals),
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_prompt_tokens=usage.cached_prompt_tokens if usage else 0,
        output_tokens=usage.completion_tokens if usage else 0,
        token_ids=tuple(token_ids),
    )


async def send_session(
    client: AsyncClient, request: BenchRequest, due_seconds: float, record: Callable[[RequestRecord], None]
) -> None:
    """Send a request and then its later turns, each after the answer before it.

    After a failure, the turns that could not be sent are recorded as ``NOT_SENT``.
    """
    record(outcome := await send(client, request, due_seconds))
    token_ids: list[int] = []
    for turn in request.later_turns:
        if outcome.status != OK:
            now = time.perf_counter()
            record(RequestRecord(NOT_SENT, now, now))
            continue
        await asyncio.sleep(turn.pause_seconds)
        token_ids += [*outcome.token_ids, *turn.token_ids]
        longer = request._replace(prompt=[*cast("Sequence[int]", request.prompt), *token_ids])
        record(outcome := await send(client, longer, time.perf_counter()))


async def open_loop(requests: Iterable[BenchRequest], offsets: Sequence[float], send: Send) -> None:
    """Send each request at its offset, whether or not the earlier ones have ended."""
    begin = time.perf_counter()

    async def send_at(request: BenchRequest, due_seconds: float) -> None:
        await asyncio.sleep(due_seconds - time.perf_counter())
        await send(request, due_seconds)

    async with asyncio.TaskGroup() as group:
        for request, offset in zip(requests, offsets, strict=True):
            group.create_task(send_at(request, begin + offset))


async def closed_loop(requests: Sequence[BenchRequest], concurrency: int, send: Send) -> None:
    """Keep ``concurrency`` requests in flight until all are done."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            await send(request, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
