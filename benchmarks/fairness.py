"""Measures how long a small tenant waits for first tokens while another tenant floods the same workers.

    python -m quire.benchmarks.fairness
    python -m quire.benchmarks.fairness --prefill 2 --decode 2

The small tenant sends one request after the other, with pauses: first without the flood, then beside each
flood, then without it again. The ratios compare with the first and the last together. The flood comes from a
process with the lowest priority, because in production clients do not use the processors of the workers.
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
"""Time for a flood to fill all queues."""
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
    requests: Annotated[int, "requests of the small tenant, for each flood"] = 40
    pause_seconds: Annotated[float, "mean time between two of them"] = 0.2
    step_tokens: Annotated[int, "most tokens in a step"] = WorkerConfig.max_num_batched_tokens
    folder: Path = CACHE


async def ttft_seconds(client: AsyncClient, rng: random.Random, num_prompt: int, num_answer: int) -> float:
    """Send a request with a new prompt, and read its answer; return the time to the first token."""
    prompt = rng.choices(VOCABULARY, k=num_prompt)
    begin, first = time.perf_counter(), 0.0
    stream = client.stream(prompt, max_tokens=num_answer, ignore_eos=True, temperature=0.0)
    async with aclosing(stream) as deltas:
        async for _ in deltas:
            first = first or time.perf_counter() - begin
    return first


async def small_tenant(address: str, key: str, options: Options) -> list[float]:
    """Return the times to the first token of the small tenant's requests."""
    rng = random.Random(time.time_ns())
    seconds = []
    async with AsyncClient(address, api_key=key, timeout=60) as client:
        for index in range(-2, options.requests):
            measured = await ttft_seconds(client, rng, options.prompt_tokens, 4)
            seconds += [measured] if index >= 0 else []
            await asyncio.sleep(rng.uniform(0.5, 1.5) * options.pause_seconds)
    return seconds


async def _send_flood(address: str, key: str, flood: Flood) -> None:
    async with AsyncClient(address, api_key=key, timeout=600) as client:

        async def repeat(seed: int) -> None:
            rng = random.Random(f"{seed} {time.time_ns()}")
            while True:
                await ttft_seconds(client, rng, flood.prompt_tokens, flood.answer_tokens)

        await asyncio.gather(*map(repeat, range(flood.concurrency)))


def _flood_process(address: str, key: str, flood: Flood) -> None:
    os.nice(19)
    asyncio.run(_send_flood(address, key, flood))


@contextmanager
def flooded(address: str, key: str, flood: Flood) -> Iterator[None]:
    """Send a flood from another process until the context ends."""
    process = multiprocessing.get_context("spawn").Process(target=_flood_process, args=(address, key, flood))
    process.start()
    try:
        time.sleep(SETTLE_SECONDS + 2)
        yield
        assert process.is_alive(), "the flood failed"
    finally:
        process.terminate()
        process.join()


def _row(beside: str, seconds: list[float]) -> dict[str, Any]:
    ms = sorted(1000 * each for each in seconds)
    row = {"beside": beside, "ttft_p50_ms": percentile(ms, 50), "ttft_p99_ms": percentile(ms, 99)}
    show_progress(f"beside {beside}: p50 {row['ttft_p50_ms']:.1f} ms, p99 {row['ttft_p99_ms']:.1f} ms")
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

            def measure() -> list[float]:
                return asyncio.run(small_tenant(stack.address, small.key, options))

            alone = measure()
            _row("nothing", alone)
            beside = {}
            for name, flood in FLOODS.items():
                with flooded(stack.address, flooding.key, flood):
                    beside[name] = measure()
                _row(name, beside[name])
                time.sleep(SETTLE_SECONDS)
            alone += measure()
    rows = [_row("nothing", alone), *(_row(name, seconds) for name, seconds in beside.items())]
    for row in rows:
        row["p50_ratio"] = row["ttft_p50_ms"] / rows[0]["ttft_p50_ms"]
        row["p99_ratio"] = row["ttft_p99_ms"] / rows[0]["ttft_p99_ms"]
    columns = {
        "beside": "{beside}",
        "first token p50 (ms)": "{ttft_p50_ms:.1f}",
        "p99 (ms)": "{ttft_p99_ms:.1f}",
        "ratio p50": "{p50_ratio:.2f}",
        "ratio p99": "{p99_ratio:.2f}",
    }
    return Report([table("A small tenant beside floods", rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
