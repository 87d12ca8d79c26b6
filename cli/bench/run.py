"""Runs a benchmark: warm-up, load, summary."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from quire.cli.bench.config import BenchConfig
from quire.cli.bench.load import closed_loop, open_loop, poisson_offsets, send
from quire.cli.bench.summary import RequestRecord, Summary, summarize
from quire.cli.bench.workload import BenchRequest, make_requests
from quire.cli.results import progress_bars
from quire.client import AsyncClient


async def run_bench(config: BenchConfig, connect: Callable[[], AsyncClient]) -> Summary:
    """Put load on the router that ``connect`` connects to; return the figures that its clients measured.

    Raises:
        QuireError: the router does not describe its model, or a warm-up request failed.
        ValueError: the prompts do not fit the model.
    """
    async with connect() as client:
        requests = make_requests(config, await client.model_info())
        for request in requests[: config.num_warmups]:
            await client.generate(request.prompt, **request.options)
        return await _measure(config, client, requests[config.num_warmups :])


async def _measure(config: BenchConfig, client: AsyncClient, requests: list[BenchRequest]) -> Summary:
    records: list[RequestRecord] = []
    with progress_bars() as progress:
        task = progress.add_task("requests", total=len(requests))

        async def record(request: BenchRequest, due_seconds: float) -> None:
            records.append(await send(client, request, due_seconds))
            progress.advance(task)

        begin = time.perf_counter()
        if config.rate is None:
            await closed_loop(requests, config.concurrency, record)
        else:
            # A separate random generator, so that the prompts are the same at any rate.
            offsets = poisson_offsets(config.rate, len(requests), random.Random(f"arrivals {config.seed}"))
            await open_loop(requests, offsets, record)
        return summarize(records, time.perf_counter() - begin)
