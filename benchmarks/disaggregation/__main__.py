"""When separate prefill and decode workers are faster than one worker for both, on the same processors.

    python -m quire.benchmarks.disaggregation
    python -m quire.benchmarks.disaggregation --prompt-tokens 128,2048 --seconds 20 --rounds 3

Each contender is a stack of ``quire serve`` with a random Llama: one colocated worker with all processors,
and one prefill and one decode worker (1P1D) that divide them, the latter with the default of
``--local-prefill-tokens``, with 0, and without a limit. Requests arrive at random times (Poisson), the same
for all contenders. The loads are shares of the rate that the colocated worker completes at most, which is
measured first for each prompt length. The contenders take turns, and those not on turn are stopped (SIGSTOP).
The table has the medians over the rounds; a winner is ahead by 5 % at least. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from quire.benchmarks.disaggregation.report import (
    ALWAYS_LOCAL,
    COLOCATED,
    DEFAULT,
    NEVER_LOCAL,
    Cell,
    Figures,
    figures_of,
    switch,
    table,
)
from quire.benchmarks.peers.command_line import FOLDER, interrupt_on_signals, show_progress
from quire.benchmarks.peers.processes import SideFailedError
from quire.benchmarks.peers.random_llamas import SIZES, make_random_llama
from quire.benchmarks.peers.rounds import rotated
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
"""Fewest requests of a round, however long they take."""


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


class Options(NamedTuple):
    """What is measured, and how long."""

    model: str
    prompt_tokens: list[int]
    output_tokens: int
    seconds: float
    num_rounds: int
    folder: Path


def measure(options: Options) -> list[Cell]:
    """Start all contenders, measure all cells, and end the contenders.

    Raises:
        SideFailedError: a contender does not start, ended, or failed a request.
    """
    path = make_random_llama(options.folder / "models" / options.model, SIZES[options.model])
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
    for prompt_tokens in options.prompt_tokens:
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
    for round_index in range(options.num_rounds):
        # Every round has prompts of its own, so that no prefix cache helps.
        seed = prompts.seed + 1 + round_index * len(LOADS) + list(LOADS).index(load)
        config = replace(prompts, rate=rate, num_requests=num_requests, seed=seed)
        for name in rotated(list(servers), round_index):
            figures = figures_of(asyncio.run(_run(name, servers[name], config)))
            rounds[name].append(figures)
            show_progress(
                f"{prompts.input_len} tokens, {load} ({rate:.2f}/s), round {round_index + 1}: {name}"
                f" TTFT {figures.ttft_p50:.0f} ms, TPOT {figures.tpot_p50:.2f} ms"
            )
    return Cell(prompts.input_len, load, rate, num_requests, rounds)


async def _run(name: str, server: Server, config: BenchConfig) -> Summary:
    async with server.turn():
        summary = await run_bench(config, lambda: AsyncClient(server.grpc_address, timeout=600))
    if summary.failures:
        raise SideFailedError(f"{name} failed: {summary.failures}")
    return summary


def _numbers(value: str) -> list[int]:
    numbers = sorted({int(each) for each in value.split(",")})
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError("numbers must be positive")
    return numbers


def parse(arguments: Sequence[str] | None) -> Options:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.benchmarks.disaggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=list(SIZES), default="7m")
    parser.add_argument("--prompt-tokens", type=_numbers, default=[128, 512, 2048, 3968], metavar="N,N,…")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10, help="length of each measurement, about")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    values = parser.parse_args(arguments)
    if values.prompt_tokens[-1] + values.output_tokens > MAX_MODEL_LEN:
        parser.error(f"a prompt and its answer have at most {MAX_MODEL_LEN} tokens")
    return Options(
        values.model,
        values.prompt_tokens,
        values.output_tokens,
        values.seconds,
        values.rounds,
        values.folder.expanduser().absolute(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cells; print the table, the best switch and the line of JSON."""
    interrupt_on_signals()
    options = parse(arguments)
    try:
        cells = measure(options)
    except SideFailedError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    console = Console(width=160)
    console.print(table(cells))
    best = switch(cells)
    console.print(f"Best --local-prefill-tokens among these prompt lengths: {best}", highlight=False)
    result = {
        "bench": "disaggregation",
        "model": options.model,
        "processors": len(os.sched_getaffinity(0)),
        "output_tokens": options.output_tokens,
        "rounds": options.num_rounds,
        "local_prefill_tokens": best,
        "cells": [cell.as_json() for cell in cells],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
