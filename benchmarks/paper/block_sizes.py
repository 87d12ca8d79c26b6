"""Measures throughput by block size, with the same pool bytes (the paper's figure 18b).

Small blocks cost the kernels and the scheduler time. Large blocks waste memory, so fewer requests fit. All
requests wait from the start; the pool has 2048 token slots and is never large enough for all of them. The
sizes take turns, and the fastest of several runs counts, since other work on the machine only adds time.
"""

from __future__ import annotations

import time

from matplotlib.axes import Axes

from quire.benchmarks.harness.engines import as_sequence, load_demo, make_engine, run_to_end
from quire.benchmarks.harness.rounds import turns
from quire.benchmarks.harness.tables import table
from quire.benchmarks.paper.prompts import Prompts, make_prompts
from quire.benchmarks.paper.report import Result, progress
from quire.benchmarks.paper.workload import ALPACA, SHAREGPT, Request
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import SamplingParams

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_SLOTS = 2048
PAPER_BEST = {"ShareGPT-like": range(16, 129), "Alpaca-like": range(16, 33)}
"""Block sizes that the paper found to be best."""


def tokens_per_second(
    model: LoadedModel, prompts: Prompts, requests: list[Request], block_size: int
) -> tuple[float, int]:
    """Return output tokens a second, and how often a request was preempted."""
    engine = make_engine(model, NUM_SLOTS // block_size, block_size=block_size)
    params = [SamplingParams(temperature=0.0, max_tokens=r.num_output, ignore_eos=True) for r in requests]
    sequences = [
        as_sequence(index, prompts(request.num_input, index), params[index])
        for index, request in enumerate(requests)
    ]
    start = time.perf_counter()
    run_to_end(engine, sequences)
    seconds = time.perf_counter() - start
    return sum(request.num_output for request in requests) / seconds, engine.preemption.num_preempted


def run(*, quick: bool) -> Result:
    """Measure each block size with both data sets."""
    model, prompts = load_demo(), make_prompts()
    sizes = (1, 16, 128) if quick else BLOCK_SIZES
    data = {
        lengths.name: lengths.draw(num_requests)
        for lengths, num_requests in ((SHAREGPT, 6 if quick else 16), (ALPACA, 24 if quick else 80))
    }
    rates: dict[str, dict[int, float]] = {name: {} for name in data}
    preemptions: dict[str, dict[int, int]] = {name: {} for name in data}
    for size in sizes:
        tokens_per_second(model, prompts, [Request(32, 4)], size)  # compiles the kernels
    for _, size in progress(turns(sizes, 1 if quick else 5, warm_up=0), "block sizes"):
        for name, requests in data.items():
            rate, preemptions[name][size] = tokens_per_second(model, prompts, requests, size)
            rates[name][size] = max(rate, rates[name].get(size, 0.0))
    rows = [
        {
            "size": str(size),
            "rate": [rates[name][size] for name in data],
            "preempted": [preemptions[name][size] for name in data],
            "paper": ["best" if size in PAPER_BEST[name] else "" for name in data],
        }
        for size in sizes
    ]
    columns = {"block size": "{size}"}
    for index, name in enumerate(data):
        columns |= {
            f"{name} tok/s": f"{{rate[{index}]:.0f}}",
            f"{name} preempted": f"{{preempted[{index}]}}",
            f"{name} paper": f"{{paper[{index}]}}",
        }
    return Result(
        table("Throughput by block size", rows, columns),
        f"The demo model on the CPU kernels, {NUM_SLOTS} token slots.",
        lambda axes: _draw(axes, rates),
        {"output_tokens_per_second": rates, "preemptions": preemptions, "num_slots": NUM_SLOTS},
    )


def _draw(axes: Axes, rates: dict[str, dict[int, float]]) -> None:
    for name, of in rates.items():
        axes.plot(list(of), list(of.values()), "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel("output tokens per second")
    axes.legend()
