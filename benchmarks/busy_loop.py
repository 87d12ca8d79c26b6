"""What a step of the engine loses to an event loop that is busy in Python.

    python -m quire.benchmarks.busy_loop [--batches 1,64] [--shares 0.1,0.3] [--threads 1] [--rounds 3]

A worker's engine runs in a thread beside the event loop that serves gRPC, so the two share one GIL. The demo
model decodes while a loop is busy for a share of each 3 ms: in the engine's process, or in another one, which
costs the CPU as much but shares no GIL. ``alone`` is a step without such a loop. The times are medians, over
the rounds, of the mean milliseconds of a step. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from random import Random
from statistics import mean, median

import torch
from rich.console import Console
from rich.table import Table

from quire.engine.engine import Engine
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel, load_model
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence
from quire.kvindex.block_hash import block_hash
from quire.models.bundled import demo_model_path
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS, NUM_TOKENS = 50, 100
PERIOD_SECONDS = 0.003
CPU = torch.device("cpu")


def run_busy_loop(share: float, is_done: Callable[[], bool]) -> None:
    """Compute in Python for a share of each period."""
    while not is_done():
        busy_until = time.perf_counter() + PERIOD_SECONDS * share
        total = 0
        while time.perf_counter() < busy_until:
            for number in range(100):
                total += number
        time.sleep(PERIOD_SECONDS * (1 - share))


def run_until_set(share: float, started: Event, done: Event) -> None:
    """Run the busy loop in a process of its own."""
    started.set()
    run_busy_loop(share, done.is_set)


def make_engine(model: LoadedModel, batch: int) -> Engine:
    """Return an engine whose prompts have been computed."""
    blocks = -(-(PROMPT_TOKENS + NUM_TOKENS) // BLOCK_SIZE) * batch * 2
    config = SchedulerConfig(BLOCK_SIZE, max_num_seqs=batch, max_num_batched_tokens=batch * PROMPT_TOKENS)
    engine = Engine(model, KvMemory(model.kv_shape(BLOCK_SIZE), blocks, CPU), config, block_hash)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for index in range(batch):
        prompt = Random(index).choices(range(4, model.vocab_size), k=PROMPT_TOKENS)
        engine.add_request(Sequence(str(index), prompt, PROMPT_TOKENS, params, b"root"))
    engine.step()
    return engine


def time_steps(engine: Engine) -> float:
    """Return the mean milliseconds of a step."""
    times = []
    while not engine.is_idle:
        started_at = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started_at)
    return mean(times) * 1e3


def time_beside_thread(engine: Engine, share: float) -> float:
    """Return the milliseconds of a step in a thread beside a busy main thread."""
    times: list[float] = []
    thread = threading.Thread(target=lambda: times.append(time_steps(engine)))
    thread.start()
    run_busy_loop(share, lambda: not thread.is_alive())
    thread.join()
    return times[0]


def time_beside_process(engine: Engine, share: float) -> float:
    """Return the milliseconds of a step beside a busy process."""
    context = get_context("spawn")
    started, done = context.Event(), context.Event()
    process = context.Process(target=run_until_set, args=(share, started, done))
    process.start()
    try:
        started.wait()
        return time_steps(engine)
    finally:
        done.set()
        process.join()


def measure(model: LoadedModel, batch: int, share: float, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a step alone, and beside the loop in both places."""
    times: dict[str, list[float]] = {"alone": [], "same_process": [], "other_process": []}
    for _ in range(rounds):
        times["alone"].append(time_steps(make_engine(model, batch)))
        times["same_process"].append(time_beside_thread(make_engine(model, batch), share))
        times["other_process"].append(time_beside_process(make_engine(model, batch), share))
    return {name: round(median(each), 3) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--shares", default="0.1,0.3", help="shares of the time in which the loop is busy")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(str(demo_model_path()), "float32", CPU)
    time_steps(make_engine(model, 1))  # compiles kernels
    table = Table(
        "sequences", "busy", "alone", "loop in the same process", "in another process", title="ms per step"
    )
    rows = []
    for batch in map(int, arguments.batches.split(",")):
        for share in map(float, arguments.shares.split(",")):
            times = measure(model, batch, share, arguments.rounds)
            table.add_row(str(batch), f"{share:.0%}", *(f"{each:.2f}" for each in times.values()))
            rows.append({"batch": batch, "share": share, **times})
    Console().print(table)
    print(json.dumps({"benchmark": "busy_loop", "threads": arguments.threads, "rows": rows}))


if __name__ == "__main__":
    main()
