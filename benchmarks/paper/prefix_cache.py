"""Measures throughput with and without the prefix cache, with a common prefix (the paper's figure 16).

The prefixes have 80 and 341 tokens, for one and five examples as in the paper. Each request adds 32 tokens
and generates 32. Without the cache, every request has a different root hash, so no block is ever found again.
Everything else is the same. The first request of a run computes the prefix.
"""

from __future__ import annotations

import time

from matplotlib.axes import Axes

from quire.benchmarks.harness.engines import as_sequence, load_demo, make_engine, run_to_end
from quire.benchmarks.harness.rounds import turns
from quire.benchmarks.harness.tables import table
from quire.benchmarks.paper.prompts import Prompts, make_prompts
from quire.benchmarks.paper.report import Result, progress
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import SamplingParams

PREFIXES = {"1 example": 80, "5 examples": 341}
PAPER = {"1 example": 1.67, "5 examples": 3.58}
"""Speed-up over Orca (Oracle), by sharing and paging together."""
OWN_TOKENS, OUTPUT_TOKENS = 32, 32


def requests_per_second(
    model: LoadedModel, prompts: Prompts, prefix: int, num_requests: int, *, cached: bool
) -> float:
    """Run requests that all wait from the start."""
    engine = make_engine(model, num_blocks=4096)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    head = prompts(prefix, -1)
    sequences = [
        as_sequence(index, head + prompts(OWN_TOKENS, index), params, b"root" if cached else None)
        for index in range(num_requests)
    ]
    start = time.perf_counter()
    run_to_end(engine, sequences)
    return num_requests / (time.perf_counter() - start)


def run(*, quick: bool) -> Result:
    """Measure both prefixes, with and without the cache in turns."""
    model, prompts = load_demo(), make_prompts()
    num_requests, repeats = (48, 1) if quick else (128, 5)
    requests_per_second(model, prompts, 80, 2, cached=True)  # compiles the kernels
    raw: dict[str, dict[bool, list[float]]] = {name: {False: [], True: []} for name in PREFIXES}
    for name, prefix in progress(PREFIXES.items(), "shared prefixes"):
        for _, cached in turns((False, True), repeats, warm_up=0):
            rate = requests_per_second(model, prompts, prefix, num_requests, cached=cached)
            raw[name][cached].append(rate)
    rates = {name: (max(found[False]), max(found[True])) for name, found in raw.items()}
    rows = [
        {
            "name": name,
            "tokens": PREFIXES[name],
            "without": without,
            "cached": cached,
            "speed_up": cached / without,
            "paper": PAPER[name],
        }
        for name, (without, cached) in rates.items()
    ]
    columns = {
        "prefix": "{name}",
        "tokens": "{tokens}",
        "no cache": "{without:.1f}",
        "cache": "{cached:.1f}",
        "speed-up": "{speed_up:.2f}x",
        "paper (over Orca Oracle)": "{paper:.2f}x",
    }
    return Result(
        table("Throughput with a shared prefix, requests a second", rows, columns),
        f"{num_requests} requests, {OWN_TOKENS} own and {OUTPUT_TOKENS} output tokens; best of {repeats}.",
        lambda axes: _draw(axes, rates),
        {
            "requests_per_second": {
                name: {"without": found[False], "with": found[True]} for name, found in raw.items()
            }
        },
    )


def _draw(axes: Axes, rates: dict[str, tuple[float, float]]) -> None:
    places = range(len(rates))
    for side, label in enumerate(("no cache", "prefix cache")):
        axes.bar([p + 0.4 * side for p in places], [rate[side] for rate in rates.values()], 0.4, label=label)
    axes.set_xticks([p + 0.2 for p in places], list(rates))
    axes.set_ylabel("requests per second")
    axes.legend()
