"""Measures the cost of resuming a preempted request of 512 tokens, by block size (the paper's figure 19a).

The engine swaps by moving the blocks to host memory and back, and recomputes by steps over a prompt of the
same tokens. On the CPU, host memory is the same kind of memory as the pool's, without PCIe in between.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from matplotlib.axes import Axes

from quire.benchmarks.harness.engines import as_sequence, load_demo, make_engine
from quire.benchmarks.harness.rounds import turns
from quire.benchmarks.harness.tables import table
from quire.benchmarks.paper.prompts import Prompts, make_prompts
from quire.benchmarks.paper.report import Result, progress
from quire.engine.engine import Engine
from quire.engine.sequences.schedule import Schedule
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import SamplingParams

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_TOKENS = 512


class Cost(NamedTuple):
    """Milliseconds: the minimum of several runs, since other work on the machine only adds time."""

    swap_out: float
    swap_in: float
    recompute: float


def measure(model: LoadedModel, prompts: Prompts, block_size: int, repeats: int) -> Cost:
    """Measure one block size."""
    num_blocks = NUM_TOKENS // block_size
    engine = make_engine(model, 4 * num_blocks + 4, block_size=block_size, num_swap_blocks=num_blocks)
    _recompute(engine, prompts, -1)  # compiles the kernels
    # Blocks of a pool in use lie anywhere: every second one.
    out = [(2 * place + 1, place) for place in range(num_blocks)]
    back = [(host_id, block_id) for block_id, host_id in out]
    times = [
        (
            _move(engine, Schedule(swap_out=out)),
            _move(engine, Schedule(swap_in=back)),
            _recompute(engine, prompts, repeat),
        )
        for repeat in range(repeats)
    ]
    return _least([Cost(*(1e3 * seconds for seconds in each)) for each in times])


def _least(costs: list[Cost]) -> Cost:
    return Cost(*map(min, zip(*costs, strict=True)))


def _move(engine: Engine, schedule: Schedule) -> float:
    start = time.perf_counter()
    engine.runner.move_blocks(schedule)
    return time.perf_counter() - start


def _recompute(engine: Engine, prompts: Prompts, index: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.add_request(as_sequence(index + 1, prompts(NUM_TOKENS, index), params))
    start = time.perf_counter()
    while not engine.is_idle:
        engine.step()
    return time.perf_counter() - start


def run(*, quick: bool) -> Result:
    """Measure each block size."""
    model, prompts = load_demo(), make_prompts()
    sizes = (1, 16, 128) if quick else BLOCK_SIZES
    runs = [
        (size, measure(model, prompts, size, repeats=5))
        for _, size in progress(turns(sizes, 1 if quick else 4, warm_up=0), "swap or recompute")
    ]
    costs = {size: _least([cost for of, cost in runs if of == size]) for size in sizes}
    rows = [
        {
            "size": size,
            **cost._asdict(),
            "both": cost.swap_out + cost.swap_in,
            "ratio": cost.recompute / (cost.swap_out + cost.swap_in),
        }
        for size, cost in costs.items()
    ]
    columns = {
        "block size": "{size}",
        "swap out": "{swap_out:.2f}",
        "swap in": "{swap_in:.2f}",
        "swap both": "{both:.2f}",
        "recompute": "{recompute:.2f}",
        "recompute / swap": "{ratio:.0f}x",
    }
    return Result(
        table(f"Milliseconds to bring {NUM_TOKENS} tokens back", rows, columns),
        "Paper: recomputing costs the same at every block size, swapping small blocks costs more than large\n"
        "ones; recomputing is never more than 20 % slower than swapping, and both are alike from 16 to 64.",
        lambda axes: _draw(axes, costs),
        {"milliseconds": costs},
    )


def _draw(axes: Axes, costs: dict[int, Cost]) -> None:
    for name in Cost._fields:
        axes.plot(list(costs), [getattr(cost, name) for cost in costs.values()], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel("milliseconds")
    axes.legend()
