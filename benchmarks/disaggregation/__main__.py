"""Finds when separate prefill and decode workers are faster than one worker, on the same processors.

    python -m quire.benchmarks.disaggregation
    python -m quire.benchmarks.disaggregation --prompt-tokens 128,2048 --seconds 20 --rounds 3

Each contender is a stack of ``quire serve`` with a random Llama. One has a single colocated worker with all
processors. The others have one prefill and one decode worker (1P1D) that divide the processors, with the
default of ``--local-prefill-tokens``, with 0, and without a limit. Requests arrive at random times (Poisson),
which are the same for all contenders. For each prompt length, the highest rate of the colocated worker is
measured first; the loads are shares of this rate. The contenders take turns, and all others are stopped
(SIGSTOP) meanwhile. The table has the medians over the rounds. A winner is ahead by at least 5 %.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from quire.benchmarks.disaggregation.report import (
    ALWAYS_LOCAL,
    COLOCATED,
    DEFAULT,
    NEVER_LOCAL,
    Cell,
    Figures,
    figures_of,
    switch,
    table_of,
)
from quire.benchmarks.harness.options import AtLeast, OneOf
from quire.benchmarks.harness.program import FailedError, Report, program
from quire.benchmarks.harness.random_llamas import CACHE, SIZES, random_llama
from quire.benchmarks.harness.rounds import show_progress, turns
from quire.benchmarks.peers.processes import SideFailedError
from quire.benchmarks.peers.servers import Server, quire_server
from quire.benchmarks.peers.sides.protocol import Setup
from quire.cli.bench.config import BenchConfig
from quire.cli.bench.run import run_bench
from quire.cli.bench.summary import Summary
from quire.client import AsyncClient

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 32
LOADS = {"light": 0.25, "medium": 0.5, "heavy": 0.8}
"""Shares of the colocated worker's highest rate."""
NUM_REQUESTS_AT_CAPACITY = 12
CONCURRENCY_AT_CAPACITY = 6
MIN_REQUESTS = 8
"""Fewest requests of a round, regardless of their duration."""


class Contender(NamedTuple):
    """How ``quire serve`` is started."""

    num_prefill: int
    arguments: tuple[str, ...] = ()


CONTENDERS = {
    COLOCATED: Contender(0),
    DEFAULT: Contender(1),
    NEVER_LOCAL: Contender(1, ("--local-prefill-tokens", "0")),
    ALWAYS_LOCAL: Contender(1, ("--local-prefill-tokens", str(MAX_MODEL_LEN))),
}


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: Annotated[str, OneOf(SIZES)] = "7m"
    prompt_tokens: Annotated[tuple[int, ...], "lengths of the prompts"] = (128, 512, 2048, 3968)
    output_tokens: Annotated[int, AtLeast(2)] = 64
    seconds: Annotated[float, "length of each measurement, about"] = 10.0
    rounds: Annotated[int, AtLeast(1)] = 1
    folder: Path = CACHE

    def __post_init__(self) -> None:
        if min(self.prompt_tokens) < 1 or max(self.prompt_tokens) + self.output_tokens > MAX_MODEL_LEN:
            raise ValueError(f"a prompt has 1 token or more, and with its answer {MAX_MODEL_LEN} at most")


def measure(options: Options) -> list[Cell]:
    """Start all contenders, measure all cells, and end the contenders.

    Raises:
        SideFailedError: a contender does not start, ended, or failed a request.
    """
    path = random_llama(options.model, options.folder, max_length=MAX_MODEL_LEN)
    setup = Setup(str(path), "float32", len(os.sched_getaffinity(0)), MAX_NUM_SEQS, MAX_MODEL_LEN)
    with ExitStack() as stack:
        servers = {}
        for index, (name, contender) in enumerate(CONTENDERS.items()):
            show_progress(f"{name} starts")
            log = options.folder / "logs" / f"disaggregation-{index}.log"
            servers[name] = stack.enter_context(
                quire_server(setup, log, contender.num_prefill, contender.arguments)
            )
        return list(_cells(options, servers))


def _cells(options: Options, servers: Mapping[str, Server]) -> Iterator[Cell]:
    for prompt_tokens in sorted(options.prompt_tokens):
        prompts = BenchConfig(
            input_len=prompt_tokens,
            output_len=options.output_tokens,
            ignore_eos=True,
            num_requests=NUM_REQUESTS_AT_CAPACITY,
            concurrency=CONCURRENCY_AT_CAPACITY,
            seed=1000 * prompt_tokens,
        )
        capacity = asyncio.run(_run(COLOCATED, servers[COLOCATED], prompts)).requests_per_second
        show_progress(f"{prompt_tokens} tokens: {COLOCATED} completes {capacity:.2f} requests/s")
        for load, share in LOADS.items():
            yield _cell(options, servers, prompts, load, share * capacity)


def _cell(
    options: Options, servers: Mapping[str, Server], prompts: BenchConfig, load: str, rate: float
) -> Cell:
    """Measure all contenders at one prompt length and load, in turns."""
    num_requests = max(MIN_REQUESTS, round(rate * options.seconds))
    rounds: dict[str, list[Figures]] = {name: [] for name in servers}
    for index, name in turns(servers, options.rounds, warm_up=0):
        # Every round has different prompts, so that no prefix cache helps.
        seed = prompts.seed + 1 + index * len(LOADS) + list(LOADS).index(load)
        config = replace(prompts, rate=rate, num_requests=num_requests, seed=seed)
        figures = figures_of(asyncio.run(_run(name, servers[name], config)))
        rounds[name].append(figures)
        show_progress(
            f"{prompts.input_len} tokens, {load} ({rate:.2f}/s), round {index + 1}: {name}"
            f" TTFT {figures.ttft_p50:.0f} ms, TPOT {figures.tpot_p50:.2f} ms"
        )
    return Cell(prompts.input_len, load, rate, num_requests, rounds)


async def _run(name: str, server: Server, config: BenchConfig) -> Summary:
    async with server.turn():
        [summary] = await run_bench(config, [lambda: AsyncClient(server.grpc_address, timeout=600)])
    if summary.failures:
        raise SideFailedError(f"{name} failed: {summary.failures}")
    return summary


@program
def main(options: Options) -> Report:
    """Measure all cells, and find the best switch."""
    try:
        cells = measure(options)
    except SideFailedError as error:
        raise FailedError(str(error)) from error
    best = switch(cells)
    line = f"Best --local-prefill-tokens among these prompt lengths: {best}"
    rows = [{**cell._asdict(), "medians": cell.medians()} for cell in cells]
    return Report([table_of(cells), line], {"local_prefill_tokens": best, "cells": rows})


if __name__ == "__main__":
    main()
