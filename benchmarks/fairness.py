"""What a small client waits beside a costly one, each an authenticated tenant with a process of its own.

    python -m quire.benchmarks.fairness
    python -m quire.benchmarks.fairness --loads samples,beams --requests 100 --rounds 3

A router, a prefill and a decode worker on this machine serve the demo model. The small client sends one short
request after the other: first alone, then beside a costly client of each kind, and alone again. The table has
its times to the first token and to the end, in milliseconds, and the requests that the costly client ended in
the meantime. The clients share the processors with the servers.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import numpy as np

from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.tables import table
from quire.client import AsyncClient
from quire.models.source import demo_model_path
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import local_stack
from quire.services.router.config import RouterConfig
from quire.services.router.tenants.api_keys import Tenant, new_key
from quire.services.worker.config import WorkerConfig

TIMEOUT_SECONDS = 600.0
SMALL_PROMPT, SMALL_OUTPUT = 48, 16
HUGE_PROMPT = 3500
WARM_SECONDS = 3.0
"""How long a costly client runs before the small one is measured."""
MIN_SECONDS = 10.0
"""Least time for which the small client is measured."""
_SPAWN = multiprocessing.get_context("spawn")

Send = Callable[[AsyncClient, int], Awaitable[None]]
"""Sends the request with this number, and returns once it has been served."""


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Return random tokens of the demo model's vocabulary."""
    return Random(seed).choices(range(10, 300), k=num_tokens)


async def _samples(client: AsyncClient, number: int) -> None:
    await client.generate(prompt_of(number, 32), n=64, max_tokens=64, ignore_eos=True, seed=number)


async def _beams(client: AsyncClient, number: int) -> None:
    await client.generate(prompt_of(number, 32), beam_width=64, max_tokens=24, ignore_eos=True)


async def _many(client: AsyncClient, number: int) -> None:
    await client.generate(prompt_of(number, 32), max_tokens=64, ignore_eos=True, seed=number)


async def _prompts(client: AsyncClient, number: int) -> None:
    await client.generate(prompt_of(number, HUGE_PROMPT), max_tokens=2, ignore_eos=True)


async def _formats(client: AsyncClient, number: int) -> None:
    names = [f"field_{number}_{index}" for index in range(60)]
    values = {name: {"type": "string", "pattern": "^[a-z]{1,40}[0-9]{1,40}$"} for name in names}
    schema = {"type": "object", "properties": values, "required": names}
    await client.generate(prompt_of(number, 32), json_schema=schema, max_tokens=60, seed=number)


async def _unread(client: AsyncClient, number: int) -> None:
    answer = client.stream(prompt_of(number, 32), max_tokens=3000, ignore_eos=True, seed=number)
    async with aclosing(answer) as deltas:
        await anext(deltas)
        await asyncio.Event().wait()


class Load(NamedTuple):
    """What a costly client does: a number of requests at any time."""

    title: str
    concurrency: int
    send: Send


LOADS = {
    "samples": Load("n = 64", 4, _samples),
    "beams": Load("beams of 64", 4, _beams),
    "many": Load("128 requests at once", 128, _many),
    "prompts": Load(f"prompts of {HUGE_PROMPT}", 8, _prompts),
    "formats": Load("costly JSON schemas", 4, _formats),
    "unread": Load("64 unread streams", 64, _unread),
}


def run_costly(
    name: str, address: str, key: str, begun: Event, ends: Event, num_served: Synchronized[int]
) -> None:
    """Send costly requests until ``ends`` is set; runs in a process of its own."""
    asyncio.run(_send_costly(LOADS[name], address, key, begun, ends, num_served))


async def _send_costly(
    load: Load, address: str, key: str, begun: Event, ends: Event, num_served: Synchronized[int]
) -> None:
    numbers = itertools.count()

    async def go_on(client: AsyncClient) -> None:
        while True:
            await load.send(client, next(numbers))
            num_served.value += 1

    async with AsyncClient(address, api_key=key, timeout=TIMEOUT_SECONDS) as client:
        tasks = [asyncio.create_task(go_on(client)) for _ in range(load.concurrency)]
        begun.set()
        ended = asyncio.create_task(asyncio.to_thread(ends.wait))
        await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if errors := [each for each in outcomes if isinstance(each, Exception)]:
            raise errors[0]


@contextmanager
def costly_client(name: str | None, address: str, key: str) -> Iterator[Callable[[], int]]:
    """Run a costly client until the context ends; yield what counts the requests that it has been served."""
    if name is None:
        yield lambda: 0
        return
    begun, ends, num_served = _SPAWN.Event(), _SPAWN.Event(), _SPAWN.Value("i", 0)
    process = _SPAWN.Process(target=run_costly, args=(name, address, key, begun, ends, num_served))
    process.start()
    try:
        if not begun.wait(TIMEOUT_SECONDS):
            raise RuntimeError(f"the costly client of {name} has not begun")
        time.sleep(WARM_SECONDS)
        yield lambda: num_served.value
    finally:
        ends.set()
        process.join(TIMEOUT_SECONDS)
    if process.exitcode:
        raise RuntimeError(f"the costly client of {name} failed")


class Times(NamedTuple):
    """Seconds of one small request."""

    first: float
    whole: float


async def small_requests(address: str, key: str, num_requests: int, seed: int) -> list[Times]:
    """Send short requests one after the other, and return the times of each."""
    times: list[Times] = []
    started = time.perf_counter()
    async with AsyncClient(address, api_key=key, timeout=TIMEOUT_SECONDS) as client:
        for number in itertools.count():
            if number >= num_requests and time.perf_counter() - started >= MIN_SECONDS:
                break
            prompt = prompt_of(seed * 1_000_000 + number, SMALL_PROMPT)
            begun, first = time.perf_counter(), 0.0
            async for delta in client.stream(prompt, max_tokens=SMALL_OUTPUT, ignore_eos=True, seed=number):
                if delta.token_ids and not first:
                    first = time.perf_counter() - begun
            times.append(Times(first, time.perf_counter() - begun))
    return times


def measure(name: str | None, address: str, keys: dict[str, str], num_requests: int, seed: int) -> Row:
    """Measure the small client, beside one costly client if it has a name."""
    with costly_client(name, address, keys["costly"]) as num_served:
        before, begun = num_served(), time.perf_counter()
        times = asyncio.run(small_requests(address, keys["small"], num_requests, seed))
        served, seconds = num_served() - before, time.perf_counter() - begun
    return Row(times, served, seconds)


class Row(NamedTuple):
    """The times of the small client's requests, and what the costly client got in the meantime."""

    times: list[Times]
    num_costly: int
    seconds: float

    def figures(self) -> dict[str, float]:
        """Return milliseconds of the small client, and the costly client's requests per second."""
        first, whole = np.array(self.times).T * 1e3
        values = {
            f"{name}_p{share}_ms": round(float(np.percentile(each, share)), 1)
            for name, each in (("ttft", first), ("latency", whole))
            for share in (50, 99)
        }
        return {**values, "costly_per_second": round(self.num_costly / self.seconds, 2)}


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    loads: Annotated[tuple[str, ...], OneOf(LOADS), "kinds of costly clients"] = tuple(LOADS)
    requests: Annotated[int, "least small requests in each case and round"] = 60
    rounds: Annotated[int, "rounds, whose requests count together"] = 1
    prefill: Annotated[int, "prefill workers"] = 1


@program
def main(options: Options) -> Report:
    """Measure all cases."""
    cases = [None, *options.loads, None]
    results: list[list[Row]] = [[] for _ in cases]
    new_keys = {name: new_key(Tenant(name)) for name in ("small", "costly")}
    keys = {name: each.key for name, each in new_keys.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.writelines(each.line + "\n" for each in new_keys.values())
        file.flush()
        config = LocalStackConfig(
            num_prefill=options.prefill,
            num_decode=1,
            router=RouterConfig(port=0, api_keys_file=Path(file.name)),
            worker=WorkerConfig(role="decode", model=str(demo_model_path()), dtype="float32"),
            log_level="error",
        )
        with local_stack(config) as stack:
            measure(None, stack.address, keys, 10, seed=99)
            for round_number in range(options.rounds):
                for case, (name, rows) in enumerate(zip(cases, results, strict=True)):
                    seed = round_number * len(cases) + case
                    rows.append(measure(name, stack.address, keys, options.requests, seed))
    titles = ["nothing", *(LOADS[name].title for name in options.loads), "nothing, again"]
    figures = [
        {"beside": title, **_joined(rows).figures()} for title, rows in zip(titles, results, strict=True)
    ]
    columns = {
        "beside": "{beside}",
        **{
            f"{name} p{share} (ms)": f"{{{name}_p{share}_ms:.1f}}"
            for name in ("ttft", "latency")
            for share in (50, 99)
        },
        "costly requests/s": "{costly_per_second:.2f}",
    }
    return Report([table("A small client's requests", figures, columns)], {"rows": figures})


def _joined(rows: list[Row]) -> Row:
    times = [each for row in rows for each in row.times]
    return Row(times, sum(row.num_costly for row in rows), sum(row.seconds for row in rows))


if __name__ == "__main__":
    main()
