"""Measures the prefix index with a million blocks, and compares it with the obvious design.

    python -m quire.benchmarks.index --blocks 1000000 --lookups 1000

It starts a separate Redis. Prompts have 64k tokens in 4096 blocks of 16. One worker holds all blocks of a
prompt, and another one the first half. The obvious design sends one pipelined command for each block: HSET to
publish and HKEYS to look up, with hexadecimal keys and worker names as fields. It hashes pickled (parent,
tokens). The floor of a look-up is an empty script with the same argument. The floor of publishing and memory
is Redis's own DEBUG POPULATE, which makes plain strings, with keys of the same length. The floor of hashing
is one SHA-256 over all the bytes.

A rebuild is measured from the moment at which the workers notice the flush; each publishes 50,000 blocks a
second. In production they notice it with the next change or renewal, and begin after a random time of up to 2
s.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import pickle
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles
from typing import Annotated, Any, NamedTuple

from redis.asyncio import Redis

from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import best_seconds
from quire.benchmarks.harness.tables import table
from quire.kvindex.block_hash import block_hashes
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.redis_index import PUBLISH_BLOCKS, RedisIndex, WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.services.local.redis_process import RedisProcess

BLOCK_SIZE = 16
PROMPT_BLOCKS = 4096
NUM_WORKERS = 8
TTL_SECONDS = 10.0
OBVIOUS_BLOCKS = 25 * PROMPT_BLOCKS
OBVIOUS_LOOKUPS = 40
WARM_UP = 20
BlockHashes = list[bytes]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    blocks: Annotated[int, "blocks in the index"] = 1_000_000
    lookups: Annotated[int, "look-ups, one after another"] = 1000


class Row(NamedTuple):
    """A line of the table. If ``is_rate`` is true, higher figures are better."""

    name: str
    unit: str
    measured: float
    goal: float
    obvious: float | None = None
    floor: float | None = None
    is_rate: bool = False

    @property
    def is_met(self) -> bool:
        return self.measured >= self.goal if self.is_rate else self.measured <= self.goal


class Latency(NamedTuple):
    """Milliseconds."""

    p50: float
    p99: float


class Load(NamedTuple):
    """The time and memory that publishing a number of entries took."""

    entries_per_second: float
    bytes_per_block: float


class Stopwatch:
    """The seconds that a ``with`` block took."""

    seconds = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    watch, start = Stopwatch(), time.perf_counter()
    yield watch
    watch.seconds = time.perf_counter() - start


def make_prompts(num_blocks: int, seed: int) -> list[BlockHashes]:
    """Return prompts of random hashes."""
    random = Random(seed)
    return [
        [random.randbytes(16) for _ in range(PROMPT_BLOCKS)]
        for _ in range(max(1, num_blocks // PROMPT_BLOCKS))
    ]


def holders(number: int) -> tuple[int, int]:
    """Return the worker that holds all blocks of a prompt, and the worker that holds the first half."""
    return number % NUM_WORKERS, (number + 1) % NUM_WORKERS


def record(worker: int) -> WorkerRecord:
    return WorkerRecord(f"prefill-{worker}", "prefill", f"127.0.0.1:{worker}", "epoch", "fingerprint")


async def timed(call: Callable[[int], Awaitable[object]], repeats: int) -> Latency:
    """Return the latency of calls one after another."""
    milliseconds = []
    for number in range(-WARM_UP, repeats):
        with stopwatch() as watch:
            await call(number)
        if number >= 0:
            milliseconds.append(1000 * watch.seconds)
    return Latency(median(milliseconds), quantiles(milliseconds, n=100)[98])


async def loaded(admin: Redis, num_blocks: int, load: Callable[[], Awaitable[int]]) -> Load:
    """Return the time and memory of a load, which returns its number of entries."""
    before = (await admin.info("memory"))["used_memory"]
    with stopwatch() as watch:
        num_entries = await load()
    after = (await admin.info("memory"))["used_memory"]
    return Load(num_entries / watch.seconds, (after - before) / num_blocks)


# --- the index ----------------------------------------------------------------------------------------------


async def publish(writer: Redis, prompts: Sequence[BlockHashes]) -> int:
    """Publish from all workers together, each in order; return the number of entries."""
    held: list[list[BlockHashes]] = [[] for _ in range(NUM_WORKERS)]
    for number, prompt in enumerate(prompts):
        whole, half = holders(number)
        held[whole].append(prompt)
        held[half].append(prompt[: PROMPT_BLOCKS // 2])

    async def live(worker: int) -> None:
        lease = WorkerLease(writer, 3600.0)
        await lease.join(record(worker))
        for prompt in held[worker]:
            await lease.publish(prompt)

    await asyncio.gather(*map(live, range(NUM_WORKERS)))
    return sum(len(prompt) for prompts in held for prompt in prompts)


async def look_up_latency(reader: Redis, prompts: Sequence[BlockHashes], repeats: int) -> Latency:
    index = RedisIndex(reader)

    async def look_up(number: int) -> None:
        depths = sorted(holding.num_blocks for holding in await index.look_up(prompts[number % len(prompts)]))
        assert depths == [PROMPT_BLOCKS // 2, PROMPT_BLOCKS]

    return await timed(look_up, repeats)


@asynccontextmanager
async def publishers(writer: Redis, blocks: BlockHashes) -> AsyncIterator[list[BlockPublisher]]:
    """Yield publishers that share the blocks among them."""
    loop, running = asyncio.get_running_loop(), []
    for worker in range(NUM_WORKERS):
        lease = WorkerLease(writer, TTL_SECONDS)
        publisher = BlockPublisher(lease, PublishLedger(), loop, TTL_SECONDS / 3, rejoin_jitter_seconds=0.0)
        publisher.stored(blocks[worker::NUM_WORKERS])
        publisher.start(record(worker))
        running.append(publisher)
    yield running
    for publisher in running:
        await publisher.close()


async def rebuild_seconds(admin: Redis, writer: Redis, blocks: BlockHashes) -> float:
    """Return how long the workers take to publish everything again after a flush."""
    async with publishers(writer, blocks) as running:

        async def settled(num_keys: int) -> None:
            while await admin.dbsize() < num_keys:  # noqa: ASYNC110 - Redis reports no such event
                await asyncio.sleep(0.01)

        await settled(len(blocks) + NUM_WORKERS + 1)
        await admin.flushall()
        with stopwatch() as watch:
            for worker, publisher in enumerate(running):
                publisher.stored([worker.to_bytes(16, "little")])
            await settled(len(blocks) + 2 * NUM_WORKERS + 1)
        await admin.flushall()
    return watch.seconds


# --- the obvious design -------------------------------------------------------------------------------------


async def publish_obviously(writer: Redis, prompts: Sequence[BlockHashes]) -> int:
    async def put(worker: int, blocks: BlockHashes) -> None:
        for start in range(0, len(blocks), PUBLISH_BLOCKS):
            async with writer.pipeline(transaction=False) as pipeline:
                for each in blocks[start : start + PUBLISH_BLOCKS]:
                    pipeline.hset(f"block:{each.hex()}", f"prefill-{worker}", "1")
                await pipeline.execute()

    for number, prompt in enumerate(prompts):
        whole, half = holders(number)
        await asyncio.gather(put(whole, prompt), put(half, prompt[: PROMPT_BLOCKS // 2]))
    return len(prompts) * PROMPT_BLOCKS * 3 // 2


async def obvious_latency(reader: Redis, prompts: Sequence[BlockHashes], repeats: int) -> Latency:
    async def look_up(number: int) -> None:
        async with reader.pipeline(transaction=False) as pipeline:
            for each in prompts[number % len(prompts)]:
                pipeline.hkeys(f"block:{each.hex()}")
            holders_of_blocks = await pipeline.execute()
        depths: dict[bytes, int] = {}
        for depth, names in enumerate(holders_of_blocks):
            for name in names:
                if depths.get(name, 0) == depth:
                    depths[name] = depth + 1
        assert sorted(depths.values()) == [PROMPT_BLOCKS // 2, PROMPT_BLOCKS]

    return await timed(look_up, repeats)


def hash_obviously(root: bytes, token_ids: list[int]) -> bytes:
    parent = root
    for start in range(0, len(token_ids), BLOCK_SIZE):
        tokens = tuple(token_ids[start : start + BLOCK_SIZE])
        parent = hashlib.sha256(pickle.dumps((parent, tokens))).digest()
    return parent


# --- the whole ----------------------------------------------------------------------------------------------


async def measure_redis(redis: RedisProcess, num_blocks: int, num_lookups: int) -> list[Row]:
    admin: Any = publisher_client(redis.url)
    reader: Any = publisher_client(redis.router_url)
    writer: Any = publisher_client(redis.worker_url)
    prompts = make_prompts(num_blocks, seed=1)
    num_blocks = len(prompts) * PROMPT_BLOCKS
    gc.freeze()

    empty = admin.register_script("return 1")
    argument = bytes(16 * PROMPT_BLOCKS)
    load_floor = await loaded(admin, num_blocks, lambda: populate(admin, num_blocks))
    await admin.flushall()
    obvious_prompts = prompts[: OBVIOUS_BLOCKS // PROMPT_BLOCKS]
    obvious_load = await loaded(
        admin, len(obvious_prompts) * PROMPT_BLOCKS, lambda: publish_obviously(admin, obvious_prompts)
    )
    obvious = await obvious_latency(admin, obvious_prompts, OBVIOUS_LOOKUPS)
    await admin.flushall()
    load = await loaded(admin, num_blocks, lambda: publish(writer, prompts))
    latency = await look_up_latency(reader, prompts, num_lookups)
    floor = await timed(lambda number: empty(keys=["{q}"], args=[argument]), num_lookups)
    await admin.flushall()
    rebuild = await rebuild_seconds(admin, writer, [each for prompt in prompts for each in prompt])
    for client in (admin, reader, writer):
        await client.aclose()
    rates = load.entries_per_second, 200e3, obvious_load.entries_per_second, load_floor.entries_per_second
    sizes = load.bytes_per_block, 125, obvious_load.bytes_per_block, load_floor.bytes_per_block
    return [
        Row("look-up of 64k tokens, p50", "ms", latency.p50, 0.6, obvious.p50, floor.p50),
        Row("look-up of 64k tokens, p99", "ms", latency.p99, 2.0, obvious.p99, floor.p99),
        Row("Redis memory per block", "bytes", *sizes),
        Row("publishes", "1/s", *rates, is_rate=True),
        Row(
            f"rebuild of {num_blocks:,} blocks",
            "s",
            rebuild,
            5.0,
            num_blocks / obvious_load.entries_per_second,
        ),
    ]


async def populate(admin: Any, num_keys: int) -> int:
    """Let Redis make plain strings of 4 bytes with keys of 20 bytes, as in the index."""
    await admin.execute_command("DEBUG", "POPULATE", num_keys, "123456789012", 4)
    return num_keys


def measure_hashing() -> Row:
    token_ids = Random(0).choices(range(150_000), k=PROMPT_BLOCKS * BLOCK_SIZE)
    encoded = array("I", token_ids).tobytes()

    ways = (
        lambda: block_hashes(b"root", token_ids, BLOCK_SIZE),
        lambda: hash_obviously(b"root", token_ids),
        lambda: hashlib.sha256(encoded).digest(),
    )
    ours, obvious, floor = (1000 * best_seconds(each) for each in ways)
    return Row("hashing 64k tokens", "ms", ours, 5.0, obvious, floor)


def _show(row: Row) -> dict[str, str]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

    texts = {name: number(getattr(row, name)) for name in ("measured", "obvious", "floor")}
    goal = f"{'≥' if row.is_rate else '≤'} {number(row.goal)}"
    return {
        "name": f"{row.name} ({row.unit})",
        **texts,
        "goal": goal,
        "verdict": "" if row.is_met else "missed",
    }


@program
def main(options: Options) -> Report:
    """Measure the index in Redis, and the hashing."""
    logging.getLogger("quire").setLevel(logging.ERROR)  # the flush is meant
    with RedisProcess(max_memory="4gb") as redis:
        rows = asyncio.run(measure_redis(redis, options.blocks, options.lookups))
    rows.append(measure_hashing())
    columns = {
        "": "{name}",
        "measured": "{measured}",
        "goal": "{goal}",
        " ": "{verdict}",
        "one command per block": "{obvious}",
        "floor": "{floor}",
    }
    results = [{**row._asdict(), "is_met": row.is_met} for row in rows]
    return Report([table("The prefix index", map(_show, rows), columns)], {"rows": results})


if __name__ == "__main__":
    main()
