"""Measures how long a small tenant waits for tokens while another tenant floods the same workers.

    python -m quire.benchmarks.fairness
    python -m quire.benchmarks.fairness --prefill 2 --decode 2

The small tenant sends one request after the other, with pauses: alternately without a flood, and beside one
that has had an answer. The ratios compare with all its requests without a flood together. The flood comes
from a process with the lowest priority, because in production clients do not use the processors of the
workers.

Beside "busy processors" there is no flood, but each processor of the machine also runs a loop of another
program. This ratio is the price of sharing processors, of which no order of requests can relieve the tenant.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_llamas import CACHE, SIZES, random_llama
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.cli.bench.summary import percentile
from quire.client import AsyncClient
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import local_stack
from quire.services.router.config import RouterConfig
from quire.services.router.tenants.api_keys import NewKey, Tenant, new_key
from quire.services.worker.config import WorkerConfig

MAX_MODEL_LEN = 4096
SETTLE_SECONDS = 1.0
"""Time for a flood to fill all queues, or for the workers to notice that it has ended."""
MOST_SECONDS_TO_ANSWER = 120.0
"""Longest time until a flood's first answer."""
POLL_SECONDS = 0.05
PERCENTILES = (50, 99)
VOCABULARY = range(100, 1000)

Load = AbstractContextManager[Callable[[], int]]
"""What the small tenant is beside; its function returns how many answers it has had."""


class Flood(NamedTuple):
    """The requests of the other tenant: this many at a time, each followed by the next."""

    concurrency: int
    prompt_tokens: int
    answer_tokens: int


FLOODS = {
    "long prompts": Flood(16, 3000, 1),
    "many answers": Flood(128, 32, 512),
    "tiny requests": Flood(64, 8, 1),
}


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: Annotated[str, OneOf(SIZES)] = "7m"
    prefill: int = 1
    decode: int = 1
    prompt_tokens: Annotated[int, "tokens of the small tenant's prompts"] = 1024
    answer_tokens: Annotated[int, "tokens of its answers"] = 16
    requests: Annotated[int, "requests of the small tenant, for each flood"] = 40
    pause_seconds: Annotated[float, "mean time between two of them"] = 0.2
    step_tokens: Annotated[int, "most tokens in a step"] = WorkerConfig.max_num_batched_tokens
    folder: Path = CACHE


class Times(NamedTuple):
    """Seconds of one request: until its first token, and until its last."""

    first_token: float
    answer: float


async def answer_times(client: AsyncClient, rng: random.Random, num_prompt: int, num_answer: int) -> Times:
    """Send a request with a new prompt, and read its answer."""
    prompt = rng.choices(VOCABULARY, k=num_prompt)
    begin, first = time.perf_counter(), 0.0
    stream = client.stream(prompt, max_tokens=num_answer, ignore_eos=True, temperature=0.0)
    async with aclosing(stream) as deltas:
        async for _ in deltas:
            first = first or time.perf_counter() - begin
    return Times(first, time.perf_counter() - begin)


async def small_tenant(address: str, key: str, options: Options) -> list[Times]:
    """Return the times of the small tenant's requests."""
    rng = random.Random(time.time_ns())
    times = []
    async with AsyncClient(address, api_key=key, timeout=60) as client:
        for index in range(-2, options.requests):
            measured = await answer_times(client, rng, options.prompt_tokens, options.answer_tokens)
            times += [measured] if index >= 0 else []
            await asyncio.sleep(rng.uniform(0.5, 1.5) * options.pause_seconds)
    return times


async def _send_flood(address: str, key: str, flood: Flood, num_answers: Synchronized[int]) -> None:
    async with AsyncClient(address, api_key=key, timeout=600) as client:

        async def repeat(seed: int) -> None:
            rng = random.Random(f"{seed} {time.time_ns()}")
            while True:
                await answer_times(client, rng, flood.prompt_tokens, flood.answer_tokens)
                num_answers.value += 1

        await asyncio.gather(*map(repeat, range(flood.concurrency)))


def _flood_process(address: str, key: str, flood: Flood, num_answers: Synchronized[int]) -> None:
    os.nice(19)
    asyncio.run(_send_flood(address, key, flood, num_answers))


def _compute_forever() -> None:
    while True:
        pass


@contextmanager
def busy_processors() -> Iterator[Callable[[], int]]:
    """Let one process for each processor compute until the context ends."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute_forever) for _ in os.sched_getaffinity(0)]
    for process in processes:
        process.start()
    try:
        time.sleep(SETTLE_SECONDS)
        yield lambda: 0
    finally:
        for process in processes:
            process.terminate()
            process.join()


@contextmanager
def flooded(address: str, key: str, flood: Flood) -> Iterator[Callable[[], int]]:
    """Send a flood from another process until the context ends, which begins after its first answer.

    The context gets a function that returns how many answers the flood has had.
    """
    context = multiprocessing.get_context("spawn")
    num_answers: Synchronized[int] = context.Value("q", 0)
    process = context.Process(target=_flood_process, args=(address, key, flood, num_answers))
    process.start()
    try:
        give_up_at = time.perf_counter() + MOST_SECONDS_TO_ANSWER
        while not num_answers.value:
            assert time.perf_counter() < give_up_at, "the flood got no answer"
            time.sleep(POLL_SECONDS)
        time.sleep(SETTLE_SECONDS)
        yield lambda: num_answers.value
        assert process.is_alive(), "the flood failed"
    finally:
        process.terminate()
        process.join()


def _row(beside: str, times: list[Times], alone: list[Times]) -> dict[str, Any]:
    row: dict[str, Any] = {"beside": beside}
    for field in Times._fields:
        ms = sorted(1000 * getattr(each, field) for each in times)
        baseline = sorted(1000 * getattr(each, field) for each in alone)
        for part in PERCENTILES:
            row[f"{field}_p{part}_ms"] = percentile(ms, part)
            row[f"{field}_p{part}_ratio"] = percentile(ms, part) / percentile(baseline, part)
    return row


def _config(options: Options, folder: Path, *keys: NewKey) -> LocalStackConfig:
    path = folder / "keys"
    path.write_text("".join(f"{key.line}\n" for key in keys))
    return LocalStackConfig(
        num_prefill=options.prefill,
        num_decode=options.decode,
        router=RouterConfig(port=0, api_keys_file=path),
        worker=WorkerConfig(
            role="decode",
            model=str(random_llama(options.model, options.folder, max_length=MAX_MODEL_LEN)),
            max_num_batched_tokens=options.step_tokens,
        ),
        log_level="error",
    )


@program
def main(options: Options) -> Report:
    """Measure without a flood and beside each load in alternation."""
    small, flooding = new_key(Tenant("small")), new_key(Tenant("flooding"))
    alone: list[Times] = []
    beside: dict[str, list[Times]] = {}
    answers_per_second: dict[str, float] = {}
    with (
        TemporaryDirectory() as folder,
        local_stack(_config(options, Path(folder), small, flooding)) as stack,
    ):
        loads: dict[str, Load] = {"busy processors": busy_processors()}
        for name, flood in FLOODS.items():
            loads[name] = flooded(stack.address, flooding.key, flood)

        def measure() -> list[Times]:
            return asyncio.run(small_tenant(stack.address, small.key, options))

        for name, load in loads.items():
            alone += measure()
            with load as num_answers:
                begin, num_before = time.perf_counter(), num_answers()
                beside[name] = measure()
                num_new, seconds = num_answers() - num_before, time.perf_counter() - begin
                answers_per_second[name] = num_new / seconds
            numbers = [f"{k} {v:.2f}" for k, v in _row(name, beside[name], alone).items() if k != "beside"]
            show_progress(f"beside {name}: {', '.join(numbers)}")
            time.sleep(SETTLE_SECONDS)
        alone += measure()
    rows = [_row(name, times, alone) for name, times in {"nothing": alone, **beside}.items()]
    for row in rows:
        row["answers_per_second"] = answers_per_second.get(row["beside"], 0.0)
    columns = {"beside": "{beside}", "its answers/s": "{answers_per_second:.1f}"}
    for field in Times._fields:
        for part in PERCENTILES:
            title = f"{field.replace('_', ' ')} p{part}"
            columns[f"{title} (ms)"] = f"{{{field}_p{part}_ms:.0f}}"
            columns[f"{title} ratio"] = f"{{{field}_p{part}_ratio:.2f}}"
    return Report([table("A small tenant beside floods", rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
