"""Servers of quire and vLLM on this CPU: tokens per second and latencies that one client measures, in turns.

    python -m quire.benchmarks.peers --install --sides vllm    # once
    python -m quire.benchmarks.peers.served
    python -m quire.benchmarks.peers.served --models 7m --workloads one-stream --rounds 5

The sides are ``quire serve`` with one worker for prompts and answers, over HTTP and over gRPC, ``quire
serve`` with a prefill and a decode worker (``1p1d``), and vLLM's OpenAI server. Each server uses all
processors, which it shares with the client, and is stopped (SIGSTOP) while it is another side's turn. A round
sends a workload's requests to each side, all at once: prompts of token ids, streamed, greedy, past
end-of-sequence tokens. Before the first round each side runs the workload once. The tables have the medians
of the rounds, and how each side compares with vLLM in the same round. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from quire.benchmarks.peers.__main__ import DTYPES
from quire.benchmarks.peers.clients import (
    CHECK_PROMPT,
    CHECK_TOKENS,
    Send,
    grpc_sender,
    http_sender,
    run_together,
)
from quire.benchmarks.peers.command_line import FOLDER, add_names, interrupt_on_signals, show_progress
from quire.benchmarks.peers.processes import SideFailedError
from quire.benchmarks.peers.random_llamas import SIZES, make_random_llama
from quire.benchmarks.peers.rounds import rotated
from quire.benchmarks.peers.served_report import Figures, ServedMeasurement, figures_of, served_table
from quire.benchmarks.peers.servers import Server, quire_server, vllm_server
from quire.benchmarks.peers.sides.protocol import Dtype, Setup
from quire.benchmarks.peers.workloads import WORKLOADS, Requests, Workload


class Side(NamedTuple):
    """A server and the way that the client talks to it."""

    server: str
    connect: Callable[[Server], AbstractAsyncContextManager[Send]]


def _over_http(server: Server) -> AbstractAsyncContextManager[Send]:
    return http_sender(server.http_url)


def _over_grpc(server: Server) -> AbstractAsyncContextManager[Send]:
    return grpc_sender(server.grpc_address)


SIDES = {
    "quire": Side("quire", _over_http),
    "quire-grpc": Side("quire", _over_grpc),
    "quire-1p1d": Side("quire-1p1d", _over_http),
    "vllm": Side("vllm", _over_http),
}
SERVED_WORKLOADS = ("mixed", "shared-prefix", "one-stream", "decode")


class Options(NamedTuple):
    """What is compared, and how."""

    sides: list[str]
    models: list[str]
    dtypes: list[Dtype]
    workloads: list[Workload]
    num_rounds: int
    folder: Path


def start(name: str, setup: Setup, folder: Path) -> Server:
    """Start a server by its name.

    Raises:
        SideFailedError: it is not installed, or does not start here.
    """
    log = folder / "logs" / f"serve-{name}-{Path(setup.model).name}-{setup.dtype}.log"
    if name == "vllm":
        return vllm_server(setup, folder, log)
    return quire_server(setup, log, num_prefill=1 if name == "quire-1p1d" else 0)


def compare(options: Options, model: str, dtype: Dtype) -> tuple[list[ServedMeasurement], list[str]]:
    """Start all servers with a model, run the workloads, and end the servers.

    Returns:
        The measurements, one for each workload, and what could not run, each with the reason.
    """
    path = make_random_llama(options.folder / "models" / model, SIZES[model])
    setup = Setup(
        str(path),
        dtype,
        len(os.sched_getaffinity(0)),
        max_num_seqs=max(workload.num_requests for workload in options.workloads),
        max_model_len=max(workload.max_model_len for workload in options.workloads),
    )
    failures: list[str] = []
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in dict.fromkeys(SIDES[side].server for side in options.sides):
            show_progress(f"{model}, {dtype}: the server {name} starts")
            try:
                servers[name] = stack.enter_context(start(name, setup, options.folder))
            except SideFailedError as error:
                failures.append(f"{name} cannot serve {model} in {dtype} here: {error}")
        running = {
            side: servers[SIDES[side].server] for side in options.sides if SIDES[side].server in servers
        }
        measurements = []
        for workload in options.workloads if running else ():
            vocab_size = SIZES[model]["vocab_size"]
            rounds, reasons = asyncio.run(run_rounds(workload, running, vocab_size, options.num_rounds))
            measurements.append(ServedMeasurement(model, dtype, workload.name, rounds))
            failures += [
                f"{side} cannot run {workload.name} of {model}: {why}" for side, why in reasons.items()
            ]
        return measurements, failures


async def run_rounds(
    workload: Workload, running: Mapping[str, Server], vocab_size: int, num_rounds: int
) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Run a workload on all sides, once to warm up and then in ``num_rounds`` rounds, in rotating order.

    Returns:
        The figures of each round, by side, and the reasons of sides that failed, which have no figures.
    """
    rounds: dict[str, list[Figures]] = {side: [] for side in running}
    failures: dict[str, str] = {}
    for round_index in range(num_rounds + 1):
        for turn, side in enumerate(rotated(list(running), round_index)):
            if side in failures:
                continue
            # Two sides may share a server: the same prompts would be in its prefix cache the second time.
            requests = workload.requests(vocab_size, seed=round_index * len(SIDES) + turn)
            try:
                figures = await run_turn(side, running[side], requests)
            except SideFailedError as error:
                failures[side] = str(error)
                del rounds[side]
                continue
            name = f"round {round_index}" if round_index else "warm-up"
            show_progress(
                f"{workload.name}, {name}: {side} {figures.tokens_per_second:.0f} tokens/s,"
                f" TTFT {figures.ttft_p50_ms:.1f} ms, TPOT {figures.tpot_p50_ms:.2f} ms"
            )
            if round_index:
                rounds[side].append(figures)
    return rounds, failures


async def run_turn(side: str, server: Server, requests: Requests) -> Figures:
    """Send requests to a side while only its server runs; return what the client measured.

    Raises:
        SideFailedError: a request failed, or an answer has another length.
    """
    async with server.turn(), SIDES[side].connect(server) as send:
        # The first request on a connection also opens it.
        await send(CHECK_PROMPT, CHECK_TOKENS, time.perf_counter())
        summary = await run_together(send, requests)
    if summary.failures:
        raise SideFailedError(f"{side} failed: {summary.failures}")
    if summary.output_tokens != sum(requests.max_tokens):
        raise SideFailedError(f"{side} sent {summary.output_tokens} tokens, not {sum(requests.max_tokens)}")
    return figures_of(summary)


def parse(arguments: Sequence[str] | None) -> Options:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.benchmarks.peers.served",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_names(parser, {"sides": SIDES, "models": SIZES, "dtypes": DTYPES, "workloads": SERVED_WORKLOADS})
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    values = parser.parse_args(arguments)
    return Options(
        values.sides,
        values.models,
        values.dtypes,
        [WORKLOADS[name] for name in values.workloads],
        values.rounds,
        values.folder.expanduser().absolute(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the servers with each model in each type; print the tables and the line of JSON."""
    interrupt_on_signals()
    options = parse(arguments)
    console = Console(width=160)
    results, all_failures = [], []
    try:
        for model, dtype in product(options.models, options.dtypes):
            measurements, failures = compare(options, model, dtype)
            console.print(served_table(f"{model}, {dtype}, over the network", measurements))
            for failure in failures:
                console.print(failure, markup=False, highlight=False)
            results += [measurement.as_json() for measurement in measurements]
            all_failures += failures
    except KeyboardInterrupt:
        sys.exit(130)
    processors = len(os.sched_getaffinity(0))
    result = {"bench": "peers.served", "processors": processors, "rounds": options.num_rounds}
    print(json.dumps({**result, "failures": all_failures, "results": results}))


if __name__ == "__main__":
    main()
