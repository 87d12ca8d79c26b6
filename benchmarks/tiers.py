"""Measures what host memory and disk save if the blocks of conversations exceed the pool.

    python -m quire.benchmarks.tiers --conversations 8 --turns 3

Conversations begin with 760 tokens and add 40 in each turn; answers have 8. A conversation takes its next
turn after all others have taken theirs, which is the worst case of a cache that evicts the least recently
used blocks. One request runs at a time, on a random model of 7 M parameters. The time to the first token is
that of all turns except the first, in the engine, without a network. The disk is read cold: before each round
of turns, its files are dropped from the page cache.

"computed" forgets every block between requests. "pool holds all" has a pool that never evicts, and is what
the tiers would cost if moving blocks were free. The ceiling of a tier is that time plus the time to bring
back its bytes at the bandwidth of a plain copy. For the disk, it is the bandwidth of plain cold reads of
files of a block's size. The program fails unless all rows sample the same tokens.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import torch

from quire.benchmarks.harness.engines import BLOCK_SIZE, CPU, make_engine
from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import FailedError, Report, program
from quire.benchmarks.harness.random_llamas import SIZES, random_llama
from quire.benchmarks.harness.rounds import best_seconds
from quire.benchmarks.harness.tables import table
from quire.engine.engine import Engine
from quire.engine.kv_cache.disk_cache import DiskCache
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kvindex.kv_layout import KvShape
from quire.sampling.params import SamplingParams

FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 760, 40, 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    conversations: int = 8
    turns: int = 3
    folder: Annotated[Path, "folder for the disk tier"] = Path(tempfile.gettempdir())
    model: Annotated[str, OneOf(SIZES)] = "7m"
    threads: int = 2


class Setup(NamedTuple):
    """Number of blocks of each tier, and whether blocks are reused by later requests."""

    name: str
    num_pool: int
    num_host: int = 0
    num_disk: int = 0
    is_cached: bool = True


class Row(NamedTuple):
    """The results of one setup; times in milliseconds."""

    name: str
    hit_share: float
    ttft_mean: float
    ttft_p50: float
    promoted_blocks: int
    loaded_blocks: int
    ceiling_ms: float | None = None


class Run(NamedTuple):
    """A row, and the tokens that were sampled."""

    row: Row
    tokens: list[list[int]]
    num_later_turns: int


def open_engine(model: LoadedModel, setup: Setup, folder: Path) -> Engine:
    """Return an engine with the tiers of a setup; the disk's files are in the folder."""
    shape = model.kv_shape(BLOCK_SIZE)
    host = HostCache(KvMemory(shape, setup.num_host, CPU)) if setup.num_host else None
    num_bytes = setup.num_disk * (shape.block_bytes + 64)
    disk = DiskCache(folder, num_bytes, shape.block_bytes, "benchmark") if setup.num_disk else None
    return make_engine(model, setup.num_pool, max_num_seqs=8, host_cache=host, disk_cache=disk)


def serve(engine: Engine, name: str, prompt: list[int]) -> tuple[list[int], float, int]:
    """Return a request's answer, its time to the first token in ms, and its cached tokens."""
    sequence = Sequence(name, list(prompt), len(prompt), PARAMS, b"root")
    start = time.perf_counter()
    engine.add_request(sequence)
    ttft = 0.0
    while not engine.is_idle:
        updates = engine.step()
        if not ttft and any(update.tokens for update in updates):
            ttft = 1000 * (time.perf_counter() - start)
        if not engine.num_stepped:
            time.sleep(0.0002)  # the disk is being read
    return sequence.token_ids[len(prompt) :], ttft, sequence.num_cached_tokens


def converse(model: LoadedModel, setup: Setup, folder: Path, num_conversations: int, num_turns: int) -> Run:
    """Let all conversations take their turns, one after the other."""
    random = Random(0)
    engine = open_engine(model, setup, folder)
    histories: list[list[int]] = [[] for _ in range(num_conversations)]
    tokens, ttfts, num_cached, num_possible = [], [], 0, 0
    for turn in range(num_turns):
        drop_page_cache(folder)
        for number, history in enumerate(histories):
            num_before = len(history)
            history += random.choices(range(2, 300), k=TURN_TOKENS if turn else FIRST_TOKENS)
            if not setup.is_cached:
                engine.pool.clear_cache()
            answer, ttft, cached = serve(engine, f"{turn}-{number}", history)
            history += answer
            tokens.append(answer)
            if turn:
                ttfts.append(ttft)
                num_cached += cached
                # The last token of an answer is sampled, but its keys and values are never computed.
                num_possible += (num_before - 1) // BLOCK_SIZE * BLOCK_SIZE
    engine.check_conservation()
    promoted = loaded = 0
    if engine.tiers is not None:
        promoted, loaded = (engine.tiers.counts.promotions[tier] for tier in ("host", "disk"))
        if engine.tiers.disk is not None:
            assert not engine.tiers.counts.disk_errors
            engine.tiers.disk.close()
    row = Row(setup.name, num_cached / num_possible, mean(ttfts), median(ttfts), promoted, loaded)
    return Run(row, tokens, len(ttfts))


def drop_page_cache(folder: Path) -> None:
    """Write files to the disk and drop them from memory."""
    for path in folder.glob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def memory_bandwidth(shape: KvShape) -> float:
    """Return the bytes per second of copying blocks from one memory to another."""
    source, target = KvMemory(shape, 256, CPU), KvMemory(shape, 256, CPU)
    return 256 * shape.block_bytes / best_seconds(lambda: target.blocks.copy_(source.blocks))


def disk_bandwidth(shape: KvShape, folder: Path) -> float:
    """Return the bytes per second of reading files of a block's size, cold, one after the other."""
    paths = [folder / f"{index}.kv" for index in range(256)]
    for path in paths:
        path.write_bytes(os.urandom(shape.block_bytes))
    target = bytearray(shape.block_bytes)

    def read() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                file.readinto(target)

    return 256 * shape.block_bytes / best_seconds(read, prepare=lambda: drop_page_cache(folder))


def measure(
    model: LoadedModel, num_conversations: int, num_turns: int, parent: Path
) -> tuple[list[Row], dict[str, Any]]:
    """Return the row of each setup, and the sizes and bandwidths that explain them."""
    num_tokens = FIRST_TOKENS - TURN_TOKENS + num_turns * (TURN_TOKENS + ANSWER_TOKENS)
    working_set = num_conversations * -(-num_tokens // BLOCK_SIZE)
    pool = max(-(-num_tokens // BLOCK_SIZE) + 8, working_set // 4)
    setups = [
        Setup("computed", pool, is_cached=False),
        Setup("pool only", pool),
        Setup("pool and host", pool, num_host=working_set),
        Setup("pool, host and disk", pool, num_host=pool, num_disk=2 * working_set),
        Setup("pool holds all", working_set + 64),
    ]
    shape = model.kv_shape(BLOCK_SIZE)
    converse(model, setups[0], parent, 1, 2)  # compiles the kernels
    runs = []
    for setup in setups:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            runs.append(converse(model, setup, Path(folder), num_conversations, num_turns))
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        disk_rate = disk_bandwidth(shape, Path(folder))
    memory_rate = memory_bandwidth(shape)
    if any(run.tokens != runs[0].tokens for run in runs):
        raise FailedError("a tier changed the answers")
    floor = runs[-1].row.ttft_mean
    rows = []
    for run in runs:
        seconds = run.row.promoted_blocks / memory_rate + run.row.loaded_blocks / disk_rate
        moving = 1000 * seconds * shape.block_bytes / run.num_later_turns
        rows.append(run.row._replace(ceiling_ms=floor + moving if run.row.promoted_blocks else None))
    facts = {
        "working_set_blocks": working_set,
        "pool_blocks": pool,
        "block_bytes": shape.block_bytes,
        "memory_gb_per_second": memory_rate / 1e9,
        "disk_gb_per_second": disk_rate / 1e9,
    }
    return rows, facts


@program
def main(options: Options) -> Report:
    """Measure all setups."""
    torch.set_num_threads(options.threads)
    model = load_model(str(random_llama(options.model)), "float32", CPU)
    rows, facts = measure(model, options.conversations, options.turns, options.folder)
    columns = {
        "": "{name}",
        "hits": "{hit_share:.0%}",
        "TTFT mean (ms)": "{ttft_mean:.0f}",
        "p50": "{ttft_p50:.0f}",
        "ceiling (ms)": "{ceiling_ms:.0f}",
        "came back": "{promoted_blocks}",
        "from disk": "{loaded_blocks}",
    }
    title = (
        f"{facts['working_set_blocks']} blocks of {facts['block_bytes'] // 1024} KiB over a pool of "
        f"{facts['pool_blocks']}; copies {facts['memory_gb_per_second']:.1f} GB/s, "
        f"cold reads {facts['disk_gb_per_second']:.1f} GB/s"
    )
    return Report([table(title, rows, columns)], {**facts, "rows": rows})


if __name__ == "__main__":
    main()
