"""Measures how long a small tenant waits for tokens while another tenant floods the same workers.

    python -m quire.benchmarks.fairness
    python -m quire.benchmarks.fairness --prefill 2 --decode 2

The small tenant sends one request after the other, with pauses: first without the flood, then beside each
flood once that has had an answer, then without it again. The ratios compare with the first and the last
together. The flood comes from a process with the lowest priority, because in production clients do not use
the processors of the workers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
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
from quire.services.router.tenants.api_keys import Tenant, new_key
from quire.services.worker.config import WorkerConfig

MAX_MODEL_LEN = 4096
SETTLE_SECONDS = 1.0
"""Time for a flood to fill all queues, or for the workers to notice that it has ended."""
MOST_SECONDS_TO_ANSWER = 120.0
"""Longest time until a flood's first answer."""
PERCENTILES = (50, 99)
VOCABULARY = range(100, 1000)


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


async def _send_flood(address: str, key: str, flood: Flood, is_answered: Event) -> None:
    async with AsyncClient(address, api_key=key, timeout=600) as client:

        async def repeat(seed: int) -> None:
            rng = random.Random(f"{seed} {time.time_ns()}")
            while True:
                await answer_times(client, rng, flood.prompt_tokens, flood.answer_tokens)
                is_answered.set()

        await asyncio.gather(*map(repeat, range(flood.concurrency)))


def _flood_process(address: str, key: str, flood: Flood, is_answered: Event) -> None:
    os.nice(19)
    asyncio.run(_send_flood(address, key, flood, is_answered))


@contextmanager
def flooded(address: str, key: str, flood: Flood) -> Iterator[None]:
    """Send a flood from another process until the context ends, which begins after its first answer."""
    context = multiprocessing.get_context("spawn")
    is_answered = context.Event()
    process = context.Process(target=_flood_process, args=(address, key, flood, is_answered))
    process.start()
    try:
        assert is_answered.wait(MOST_SECONDS_TO_ANSWER), "the flood got no answer"
        time.sleep(SETTLE_SECONDS)
        yield
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
    show_progress(f"beside {beside}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items() if k != "beside"))
    return row


@program
def main(options: Options) -> Report:
    """Measure without a flood, beside each, and without again."""
    small, flooding = new_key(Tenant("small")), new_key(Tenant("flooding"))
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{small.line}\n{flooding.line}\n")
        config = LocalStackConfig(
            num_prefill=options.prefill,
            num_decode=options.decode,
            router=RouterConfig(port=0, api_keys_file=keys),
            worker=WorkerConfig(
                role="decode",
                model=str(random_llama(options.model, options.folder, max_length=MAX_MODEL_LEN)),
                max_num_batched_tokens=options.step_tokens,
            ),
            log_level="error",
        )
        with local_stack(config) as stack:

            def measure() -> list[Times]:
                return asyncio.run(small_tenant(stack.address, small.key, options))

            alone = measure()
            _row("nothing", alone, alone)
            beside = {}
            for name, flood in FLOODS.items():
                with flooded(stack.address, flooding.key, flood):
                    beside[name] = measure()
                _row(name, beside[name], alone)
                time.sleep(SETTLE_SECONDS)
            alone += measure()
    rows = [_row(name, times, alone) for name, times in {"nothing": alone, **beside}.items()]
    columns = {"beside": "{beside}"}
    for field in Times._fields:
        for part in PERCENTILES:
            title = f"{field.replace('_', ' ')} p{part}"
            columns[f"{title} (ms)"] = f"{{{field}_p{part}_ms:.0f}}"
            columns[f"{title} ratio"] = f"{{{field}_p{part}_ratio:.2f}}"
    return Report([table("A small tenant beside floods", rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
