"""Measures what a stream loses when its worker is killed or drains, with and without copies of answers.

    python -m quire.benchmarks.failover
    python -m quire.benchmarks.failover --tokens 500,2000 --rounds 3

A router and decode workers on this machine serve a random Llama. A client reads one sampled answer. After a
number of tokens, the worker that generates it gets SIGKILL or SIGTERM. The first table has the medians over
the rounds: the usual and the longest gap in the stream, the tokens that the next worker computed again, and
the time until the process had ended. Each answer is compared with the undisturbed one.

The second table has the tokens per second of 32 streams on two workers without failures. Stacks with and
without copies take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import median
from typing import Annotated, Any, NamedTuple
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import FailedError, Report, program
from quire.benchmarks.harness.random_llamas import SIZES, random_llama
from quire.benchmarks.harness.rounds import medians, show_progress, turns
from quire.benchmarks.harness.tables import table
from quire.cli.bench.config import BenchConfig
from quire.cli.bench.run import run_bench
from quire.client import AsyncClient
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

PROMPT_TOKENS = 64
TOKENS_AFTER = 300
"""Tokens of an answer after the failure."""
END_SECONDS = 60.0
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
LOAD = BenchConfig(input_len=256, output_len=600, ignore_eos=True, num_requests=64, concurrency=32, seed=1)


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    tokens: Annotated[tuple[int, ...], "tokens before the failure"] = (500, 2000, 4000)
    model: Annotated[str, OneOf(SIZES)] = "7m"
    rounds: Annotated[int, "rounds; medians count"] = 3


class Case(NamedTuple):
    """How a worker ends, and whether answers are copied."""

    name: str
    signal: signal.Signals
    copies: bool


CASES = (
    Case("SIGKILL", signal.SIGKILL, copies=False),
    Case("SIGKILL, with copies", signal.SIGKILL, copies=True),
    Case("SIGTERM", signal.SIGTERM, copies=False),
)


class Row(NamedTuple):
    """One answer: its gaps, the tokens computed again, and the seconds until its worker had ended."""

    longest_ms: float
    usual_ms: float
    computed_again: int
    end_seconds: float


def start(model: str, stack: ExitStack, *, copies: bool, num_decode: int) -> RunningStack:
    """Start a router and decode workers."""
    config = LocalStackConfig(
        num_prefill=0,
        num_decode=num_decode,
        router=RouterConfig(port=0, copy_answers=copies),
        worker=WorkerConfig(role="decode", model=model, dtype="float32", num_blocks=2048),
        log_level="error",
    )
    return stack.enter_context(local_stack(config))


class Computed(NamedTuple):
    """Tokens that a worker has computed, and the steps that it took."""

    tokens: int
    steps: int


def num_computed(stack: RunningStack, name: str) -> Computed:
    """Return what a worker has computed since its start."""
    url = f"http://127.0.0.1:{stack.ready[name].metrics_port}/metrics"
    with urlopen(url, timeout=END_SECONDS) as response:
        text = response.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {sample.name: int(sample.value) for sample in samples if sample.name.startswith("quire_step_")}
    return Computed(values["quire_step_tokens_sum"], values["quire_step_tokens_count"])


class Ended(NamedTuple):
    """When a worker got a signal, when it had ended, and what the others had computed before."""

    signalled_at: float
    ended_at: float
    others: dict[str, Computed]


def end_worker(stack: RunningStack, case: Case, before: dict[str, Computed]) -> Ended:
    """End the worker that has computed most since ``before``, and wait until it has ended."""
    now = {name: num_computed(stack, name) for name in before}
    busy = max(before, key=lambda name: now[name].tokens - before[name].tokens)
    process = stack.workers[busy].process
    assert process.pid is not None
    signalled_at = time.perf_counter()
    os.kill(process.pid, case.signal)
    process.join(END_SECONDS)
    return Ended(signalled_at, time.perf_counter(), {name: now[name] for name in now if name != busy})


async def measure(stack: RunningStack, case: Case, num_tokens: int, seed: int) -> Row:
    """Read an answer and end its worker after ``num_tokens`` tokens."""
    prompt = Random(f"{seed} {num_tokens}").choices(range(2, 300), k=PROMPT_TOKENS)
    max_tokens = num_tokens + TOKENS_AFTER
    alive = [name for name, child in stack.workers.items() if child.process.is_alive()]
    async with AsyncClient(stack.address, timeout=600) as client:
        before = {name: num_computed(stack, name) for name in alive}
        tokens: list[int] = []
        times: list[float] = []
        ending: asyncio.Task[Ended] | None = None
        async for delta in client.stream(prompt, max_tokens=max_tokens, **OPTIONS):
            tokens += delta.token_ids
            times.append(time.perf_counter())
            if ending is None and len(tokens) >= num_tokens:
                # The reader must not wait for this.
                ending = asyncio.create_task(asyncio.to_thread(end_worker, stack, case, before))
        assert ending is not None
        ended = await ending
        after = [(num_computed(stack, name), computed) for name, computed in ended.others.items()]
        # This comes last, since the workers would have cached it otherwise.
        expected = await client.generate(prompt, max_tokens=max_tokens, **OPTIONS)
    if tokens != list(expected.token_ids):
        raise FailedError("the answer differs from the undisturbed one")
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    first = next(index for index, at in enumerate(times) if at > ended.signalled_at)
    return Row(
        1000 * max(gaps[max(0, first - 1) :]),
        1000 * median(gaps),
        # Each step computes one new token; all other computed tokens are repeated.
        sum(now.tokens - then.tokens - (now.steps - then.steps) for now, then in after),
        ended.ended_at - ended.signalled_at,
    )


def failures(model: str, all_tokens: Sequence[int], num_rounds: int) -> list[dict[str, Any]]:
    """Return a result for each case and number of tokens."""
    rows: dict[tuple[str, int], list[Row]] = {}
    for round_index in range(num_rounds):
        for case in CASES:
            with ExitStack() as stack:
                running = start(model, stack, copies=case.copies, num_decode=len(all_tokens) + 1)
                for num_tokens in all_tokens:
                    row = asyncio.run(measure(running, case, num_tokens, round_index))
                    rows.setdefault((case.name, num_tokens), []).append(row)
                    show_progress(f"round {round_index + 1}: {case.name} after {num_tokens} tokens: {row}")
    return [
        {"case": name, "tokens": num_tokens, **medians(measured)._asdict()}
        for (name, num_tokens), measured in rows.items()
    ]


def costs(model: str, num_rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of each round, without and with copies."""
    rates: dict[str, list[float]] = {"without copies": [], "with copies": []}
    with ExitStack() as stack:
        stacks = {name: start(model, stack, copies=name == "with copies", num_decode=2) for name in rates}
        for round_index, name in turns(rates, num_rounds):
            load = replace(LOAD, seed=LOAD.seed + round_index)
            connect = partial(AsyncClient, stacks[name].address, timeout=600)
            summary = asyncio.run(run_bench(load, connect))
            if summary.failures:
                raise FailedError(f"requests failed: {summary.failures}")
            if round_index >= 0:
                rates[name].append(summary.output_tokens_per_second)
                show_progress(f"round {round_index + 1}: {name} {rates[name][-1]:.0f} tokens/s")
    return rates


@program
def main(options: Options) -> Report:
    """Measure the failures and the costs of copies."""
    max_length = PROMPT_TOKENS + max(options.tokens) + TOKENS_AFTER
    # The load needs a model with longer sequences than short answers.
    model = str(random_llama(options.model, max_length=max(max_length, LOAD.input_len + LOAD.output_len)))
    results = failures(model, options.tokens, options.rounds)
    rates = costs(model, options.rounds)
    columns = {
        "": "{case}",
        "tokens": "{tokens}",
        "longest gap (ms)": "{longest_ms:.1f}",
        "usual gap (ms)": "{usual_ms:.1f}",
        "computed again": "{computed_again:.0f}",
        "ended after (s)": "{end_seconds:.2f}",
    }
    lines = [f"{name}: {median(measured):.0f} tokens/s" for name, measured in rates.items()]
    gaps = table("A stream whose worker ends", results, columns)
    return Report([gaps, *lines], {"results": results, "tokens_per_second": rates})


if __name__ == "__main__":
    main()
