"""Measures the prefix index with a million blocks.

    python -m quire.benchmarks.index --blocks 1000000 --lookups 1000

It starts a separate Redis. Prompts have 64k tokens in 4096 blocks of 16. One worker holds all blocks of a
prompt, and another one the first half. The floor of a look-up is an empty script with the same argument. The
floor of publishing and memory is Redis's own DEBUG POPULATE, which makes plain strings, with keys of the same
length. The floor of hashing is one SHA-256 over all the bytes.

A rebuild is measured from the moment at which the workers notice the flush; each publishes 50,000 blocks a
second. In production they notice it with the next change or renewal, and begin after a random time of up to 2
s.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
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
from quire.kvindex.redis_index import RedisIndex, WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.services.local.redis_process import RedisProcess

BLOCK_SIZE = 16
PROMPT_BLOCKS = 4096
NUM_WORKERS = 8
TTL_SECONDS = 10.0
WARM_UP = 20
BlockHashes = list[bytes]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    blocks: Annotated[int, "blocks in the index"] = 1_000_000
    lookups: Annotated[int, "look-ups, one after another"] = 1000


class Row(NamedTuple):
    """A line of the table."""

    name: str
    measured: float
    goal: str
    floor: float | None = None


class Load(NamedTuple):
    """The rate and the memory of publishing."""

    entries_per_second: float
    bytes_per_block: float


def make_prompts(num_blocks: int, seed: int) -> list[BlockHashes]:
    """Return prompts of random hashes."""
    random = Random(seed)
    return [
        [random.randbytes(16) for _ in range(PROMPT_BLOCKS)]
        for _ in range(max(1, num_blocks // PROMPT_BLOCKS))
    ]


def record(worker: int) -> WorkerRecord:
    return WorkerRecord(f"prefill-{worker}", "prefill", f"127.0.0.1:{worker}", "epoch", "fingerprint")


async def timed(call: Callable[[int], Awaitable[object]], repeats: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of calls one after another, in milliseconds."""
    milliseconds = []
    for number in range(-WARM_UP, repeats):
        start = time.perf_counter()
        await call(number)
        if number >= 0:
            milliseconds.append(1000 * (time.perf_counter() - start))
    return median(milliseconds), quantiles(milliseconds, n=100)[98]


async def loaded(admin: Redis, num_blocks: int, load: Callable[[], Awaitable[int]]) -> Load:
    """Return the rate and memory of a load, which returns its number of entries."""
    before = (await admin.info("memory"))["used_memory"]
    start = time.perf_counter()
    num_entries = await load()
    seconds = time.perf_counter() - start
    after = (await admin.info("memory"))["used_memory"]
    return Load(num_entries / seconds, (after - before) / num_blocks)


async def publish(writer: Redis, prompts: Sequence[BlockHashes]) -> int:
    """Publish from all workers together, each in order; return the number of entries."""
    held: list[list[BlockHashes]] = [[] for _ in range(NUM_WORKERS)]
    for number, prompt in enumerate(prompts):
        held[number % NUM_WORKERS].append(prompt)
        held[(number + 1) % NUM_WORKERS].append(prompt[: PROMPT_BLOCKS // 2])

    async def live(worker: int) -> None:
        lease = WorkerLease(writer, 3600.0)
        await lease.join(record(worker))
        for prompt in held[worker]:
            await lease.publish(prompt)

    await asyncio.gather(*map(live, range(NUM_WORKERS)))
    return sum(len(prompt) for prompts in held for prompt in prompts)


async def populate(admin: Any, num_keys: int) -> int:
    """Let Redis make plain strings of 4 bytes with keys of 20 bytes, as in the index."""
    await admin.execute_command("DEBUG", "POPULATE", num_keys, "123456789012", 4)
    return num_keys


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
        start = time.perf_counter()
        for worker, publisher in enumerate(running):
            publisher.stored([worker.to_bytes(16, "little")])
        await settled(len(blocks) + 2 * NUM_WORKERS + 1)
        seconds = time.perf_counter() - start
        await admin.flushall()
    return seconds


async def measure_redis(redis: RedisProcess, num_blocks: int, num_lookups: int) -> list[Row]:
    """Return the lines about the index in Redis."""
    admin: Any = publisher_client(redis.url)
    reader: Any = publisher_client(redis.router_url)
    writer: Any = publisher_client(redis.worker_url)
    prompts = make_prompts(num_blocks, seed=1)
    num_blocks = len(prompts) * PROMPT_BLOCKS
    index = RedisIndex(reader)
    gc.freeze()

    async def look_up(number: int) -> None:
        depths = sorted(holding.num_blocks for holding in await index.look_up(prompts[number % len(prompts)]))
        assert depths == [PROMPT_BLOCKS // 2, PROMPT_BLOCKS]

    floor = await loaded(admin, num_blocks, lambda: populate(admin, num_blocks))
    await admin.flushall()
    load = await loaded(admin, num_blocks, lambda: publish(writer, prompts))
    p50, p99 = await timed(look_up, num_lookups)
    empty, argument = admin.register_script("return 1"), bytes(16 * PROMPT_BLOCKS)
    floor_p50, floor_p99 = await timed(lambda number: empty(keys=["{q}"], args=[argument]), num_lookups)
    await admin.flushall()
    rebuild = await rebuild_seconds(admin, writer, [each for prompt in prompts for each in prompt])
    for client in (admin, reader, writer):
        await client.aclose()
    return [
        Row("look-up of 64k tokens, p50 (ms)", p50, "≤ 0.6", floor_p50),
        Row("look-up of 64k tokens, p99 (ms)", p99, "≤ 2", floor_p99),
        Row("Redis memory per block (bytes)", load.bytes_per_block, "≤ 125", floor.bytes_per_block),
        Row("publishes (1/s)", load.entries_per_second, "≥ 200,000", floor.entries_per_second),
        Row(f"rebuild of {num_blocks:,} blocks (s)", rebuild, "≤ 5"),
    ]


def measure_hashing() -> Row:
    """Return the line about hashing."""
    token_ids = Random(0).choices(range(150_000), k=PROMPT_BLOCKS * BLOCK_SIZE)
    encoded = array("I", token_ids).tobytes()
    seconds = best_seconds(lambda: block_hashes(b"root", token_ids, BLOCK_SIZE))
    floor = best_seconds(lambda: hashlib.sha256(encoded).digest())
    return Row("hashing 64k tokens (ms)", 1000 * seconds, "≤ 5", 1000 * floor)


@program
def main(options: Options) -> Report:
    """Measure the index in Redis, and the hashing."""
    logging.getLogger("quire").setLevel(logging.ERROR)  # the flush is meant
    with RedisProcess(max_memory="4gb") as redis:
        rows = asyncio.run(measure_redis(redis, options.blocks, options.lookups))
    rows.append(measure_hashing())
    columns = {"": "{name}", "measured": "{measured:,.2f}", "goal": "{goal}", "floor": "{floor:,.2f}"}
    return Report([table("The prefix index", rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
