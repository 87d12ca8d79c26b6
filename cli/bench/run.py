"""Runs a benchmark: warm-up, load, summary; two routers take turns with the same requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from quire.cli.bench.agents import agent_requests
from quire.cli.bench.config import BenchConfig, Dataset
from quire.cli.bench.dataset_files import file_requests
from quire.cli.bench.load import closed_loop, open_loop, poisson_offsets, send_session
from quire.cli.bench.summary import RequestRecord, Summary, summarize
from quire.cli.bench.workload import BenchRequest, make_requests
from quire.cli.results import progress_bars
from quire.client import AsyncClient


@dataclass(eq=False)
class _Measured:
    """What the client of one router has measured so far."""

    client: AsyncClient
    records: list[RequestRecord] = field(default_factory=list)
    seconds: float = 0.0


async def run_bench(config: BenchConfig, connects: Sequence[Callable[[], AsyncClient]]) -> list[Summary]:
    """Put load on each router that ``connects`` connect to; return what the clients of each measured.

    Raises:
        QuireError: a router does not describe its model, or a warm-up request failed.
        ValueError: the prompts do not fit the model, or a file has no requests of the right form.
    """
    async with AsyncExitStack() as stack:
        routers = [_Measured(await stack.enter_async_context(connect())) for connect in connects]
        requests = await _requests(config, routers[0].client)
        for each in routers:
            for request in requests[: config.num_warmups]:
                await each.client.generate(request.prompt, **request.options)
        await _take_turns(config, routers, requests[config.num_warmups :])
    return [summarize(each.records, each.seconds, config.limits_ms) for each in routers]


async def _requests(config: BenchConfig, client: AsyncClient) -> list[BenchRequest]:
    model = await client.model_info()
    if config.dataset.is_file:
        return await file_requests(config, client, model)
    if config.dataset is Dataset.AGENTS:
        return agent_requests(config, model)
    return make_requests(config, model)


async def _take_turns(config: BenchConfig, routers: list[_Measured], requests: list[BenchRequest]) -> None:
    """Send the requests to one router, or in parts to each of two: a drift of the machine then hits both."""
    offsets = _offsets(config, requests)
    size = len(requests) if len(routers) == 1 else -(-len(requests) // config.rounds)
    with progress_bars() as progress:
        total = len(routers) * sum(1 + len(request.later_turns) for request in requests)
        task = progress.add_task("requests", total=total)
        for begin in range(0, len(requests), size):
            part = slice(begin, begin + size)
            for each in routers:
                await _measure(
                    config,
                    each,
                    requests[part],
                    None if offsets is None else offsets[part],
                    lambda: progress.advance(task),
                )
            routers = routers[::-1]


def _offsets(config: BenchConfig, requests: list[BenchRequest]) -> list[float] | None:
    """Return when to send each request, in seconds; None for a closed loop."""
    if config.rate is not None:
        # A separate random generator, so that the prompts are the same at any rate.
        return poisson_offsets(config.rate, len(requests), random.Random(f"arrivals {config.seed}"))
    if config.trace_speed is not None and config.dataset is not Dataset.AGENTS:
        return [request.arrival_seconds / config.trace_speed for request in requests]
    return None


async def _measure(
    config: BenchConfig,
    router: _Measured,
    requests: list[BenchRequest],
    offsets: list[float] | None,
    on_record: Callable[[], None],
) -> None:
    def record(outcome: RequestRecord) -> None:
        router.records.append(outcome)
        on_record()

    async def send(request: BenchRequest, due_seconds: float) -> None:
        await send_session(router.client, request, due_seconds, record)

    begin = time.perf_counter()
    if offsets is None:
        await closed_loop(requests, config.concurrency, send)
    else:
        await open_loop(requests, [offset - offsets[0] for offset in offsets], send)
    router.seconds += time.perf_counter() - begin
