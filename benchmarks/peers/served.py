"""Compares servers of quire and vLLM on this CPU in turns, by tokens per second and latencies of one client.

    python -m quire.benchmarks.peers --install --sides vllm    # once
    python -m quire.benchmarks.peers.served
    python -m quire.benchmarks.peers.served --models 7m --workloads one-stream --rounds 5

Two sides are ``quire serve`` with one worker for prompts and answers, over HTTP and over gRPC. The third is
``quire serve`` with a prefill and a decode worker (``1p1d``). The others are vLLM's OpenAI server, and a
prefill and a decode server of vLLM with its NIXL connector. Each side uses all processors, which it shares
with the client, and is stopped (SIGSTOP) while it is another side's turn. In a round, each side gets a
workload's requests all at the same time, or those of one stream one after the other. Prompts are token ids;
answers are streamed, greedy, and continue after end-of-sequence tokens. Before the first round each side runs
the workload once. The tables have the medians of the rounds, and how each side compares with vLLM in the same
round.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from quire.benchmarks.harness.options import AtLeast, OneOf
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_llamas import CACHE
from quire.benchmarks.harness.rounds import medians, show_progress
from quire.benchmarks.peers.clients import (
    CHECK_PROMPT,
    CHECK_TOKENS,
    Send,
    grpc_sender,
    http_sender,
    run_batches,
)
from quire.benchmarks.peers.models import MODELS_HELP, random_model
from quire.benchmarks.peers.processes import SideFailedError
from quire.benchmarks.peers.rounds import Comparison, ratios, report_all, run_rounds
from quire.benchmarks.peers.servers import Server, quire_server, vllm_server
from quire.benchmarks.peers.sides.protocol import Dtype, Setup
from quire.benchmarks.peers.workloads import WORKLOADS, Requests, Workload, setup_for
from quire.cli.bench.summary import Summary

BASELINE = "vllm"
"""The side with which all others are compared."""
STREAMS_IN_TURN = 8
"""How many answers a round of one stream has, one after the other, since the times of a single one vary."""


class Side(NamedTuple):
    """A server, and the API that the client uses."""

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
    "vllm-1p1d": Side("vllm-1p1d", _over_http),
}
SERVED_WORKLOADS = ("mixed", "shared-prefix", "one-stream", "decode")


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    sides: Annotated[tuple[str, ...], OneOf(SIDES)] = tuple(SIDES)
    models: Annotated[tuple[str, ...], MODELS_HELP] = ("7m", "100m")
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    workloads: Annotated[tuple[str, ...], OneOf(SERVED_WORKLOADS)] = SERVED_WORKLOADS
    rounds: Annotated[int, AtLeast(1)] = 5
    folder: Path = CACHE


COLUMNS = {
    "workload": "{workload}",
    "side": "{side}",
    "tokens/s": "{tokens_per_second:.0f}",
    "TTFT p50 (ms)": "{ttft_p50_ms:.1f}",
    "TTFT p99 (ms)": "{ttft_p99_ms:.1f}",
    "TPOT p50 (ms)": "{tpot_p50_ms:.2f}",
    f"tokens/s / {BASELINE}": "{ratios[tokens_per_second]:.2f}",
    f"TTFT p50 / {BASELINE}": "{ratios[ttft_p50_ms]:.2f}",
    f"TTFT p99 / {BASELINE}": "{ratios[ttft_p99_ms]:.2f}",
    f"TPOT / {BASELINE}": "{ratios[tpot_p50_ms]:.2f}",
}


class Figures(NamedTuple):
    """The clients' figures of one round; TPOT is 0 if no answer has a second token."""

    tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float


def figures_of(summary: Summary) -> Figures:
    """Return the figures of a round in which every request succeeded."""
    assert summary.ttft_ms is not None
    tpot = summary.tpot_ms.p50 if summary.tpot_ms else 0.0
    return Figures(summary.output_tokens_per_second, summary.ttft_ms.p50, summary.ttft_ms.p99, tpot)


@program
def main(options: Options) -> Report:
    """Compare the servers with each model in each type."""
    return report_all(options.models, options.dtypes, partial(compare, options), COLUMNS)


def start(name: str, setup: Setup, folder: Path) -> Server:
    """Start a server by its name.

    Raises:
        SideFailedError: it is not installed, or does not start here.
    """
    log = folder / "logs" / f"serve-{name}-{Path(setup.model).name}-{setup.dtype}.log"
    if name.startswith("vllm"):
        return vllm_server(setup, folder, log, is_pair=name == "vllm-1p1d")
    return quire_server(setup, log, num_prefill=1 if name == "quire-1p1d" else 0)


def compare(options: Options, model: str, dtype: Dtype) -> Comparison:
    """Start all servers with a model, run the workloads, and end the servers."""
    workloads = [WORKLOADS[name] for name in options.workloads]
    path, vocab_size = random_model(model, options.folder)
    setup = setup_for(workloads, path, dtype, len(os.sched_getaffinity(0)))
    rows, failures = [], []
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
        for workload in workloads if running else ():
            found, reasons = measure(workload, running, vocab_size, options.rounds)
            rows += [{"model": model, "dtype": dtype, "workload": workload.name, **row} for row in found]
            failures += [
                f"{side} cannot run {workload.name} of {model}: {why}" for side, why in reasons.items()
            ]
        return Comparison(rows, failures, {}, {})


def measure(
    workload: Workload, running: Mapping[str, Server], vocab_size: int, num_rounds: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for each side that ran a workload, and why the others did not."""

    def run(side: str, index: int) -> Figures:
        # Two sides may share a server, which would have the same prompts in its prefix cache the second time.
        num_batches = STREAMS_IN_TURN if workload.num_requests == 1 else 1
        batches = [workload.requests(vocab_size, (side, index, number)) for number in range(num_batches)]
        figures = asyncio.run(run_turn(side, running[side], batches))
        show_progress(f"{workload.name}, round {index + 1}: {side} {figures}")
        return figures

    rounds, failures = run_rounds(running, num_rounds, run)
    baseline = rounds.get(BASELINE)
    rows = []
    for side, measured in rounds.items():
        compared: dict[str, Any] = dict.fromkeys(Figures._fields)
        if baseline is not None and side != BASELINE:
            compared = ratios(measured, baseline)._asdict()
        rows.append({"side": side, **medians(measured)._asdict(), "ratios": compared, "rounds": measured})
    return rows, failures


async def run_turn(side: str, server: Server, batches: Sequence[Requests]) -> Figures:
    """Send batches of requests to a side while only its server runs; return what the client measured.

    Raises:
        SideFailedError: a request failed, or an answer has another length.
    """
    async with server.turn(), SIDES[side].connect(server) as send:
        # The first request on a connection also opens it.
        await send(CHECK_PROMPT, CHECK_TOKENS, time.perf_counter())
        summary = await run_batches(send, batches)
    if summary.failures:
        raise SideFailedError(f"{side} failed: {summary.failures}")
    num_tokens = sum(sum(requests.max_tokens) for requests in batches)
    if summary.output_tokens != num_tokens:
        raise SideFailedError(f"{side} sent {summary.output_tokens} tokens, not {num_tokens}")
    return figures_of(summary)


if __name__ == "__main__":
    main()
