"""Compares the request rates of paged and contiguous memory at a latency bound (the paper's figure 12).

All systems run on the same engine, kernels and demo model. The baselines differ in only one thing: the engine
gets a request when the baseline's allocator has placed it, the oldest first. At most as many requests run as
the allocator can place in the pool's bytes. The engine of a baseline has twice as many blocks, so its own
paging never interferes. This favours the baselines: they get chunked prefill and the paged kernels, and
FasterTransformer also gets a batch that shrinks as requests end.

The clock is discrete: it advances by the measured seconds of each engine step and jumps to the next arrival
when nothing runs. Arrivals are Poisson. Lengths are a quarter of ShareGPT's. So are the longest length and
the pool, so as many requests fit as with the paper's OPT-13B. Latency is normalized as in the paper: seconds
from arrival to end, divided by output tokens, averaged over requests. The bound is ten times that of a single
request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes

from quire.benchmarks.harness.engines import BLOCK_SIZE, as_sequence, load_demo, make_engine
from quire.benchmarks.harness.tables import table
from quire.benchmarks.paper.allocators import AdmissionPolicy, baselines
from quire.benchmarks.paper.report import Result, progress
from quire.benchmarks.paper.workload import SHAREGPT, Prompts, Request, make_prompts, poisson_arrivals
from quire.engine.engine import Engine
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import SamplingParams

SCALE = 0.25
LENGTHS = SHAREGPT.scaled(SCALE)
NUM_SLOTS = 3920
MAX_NUM_SEQS = 256
BOUND = 10
"""Bound on the normalized latency, as a multiple of that of a single request."""
PAPER = {"Orca (Max)": "2.7x to 8x", "Orca (Oracle)": "1.7x to 2.7x", "FasterTransformer": "up to 22x"}
"""Rate that vLLM sustains at similar latencies, as a multiple of the baseline's (section 6.2)."""


class Paged:
    """Admits all requests immediately: quire's own scheduler decides."""

    reserved: Mapping[int, int] = {}

    def place(self, index: int, request: Request) -> bool:
        """Admit the request."""
        return True

    def close(self) -> None:
        """Nothing to do."""

    def finish(self, index: int) -> None:
        """Nothing to do."""


class Served(NamedTuple):
    """A run: mean seconds per output token, and seconds from the first arrival to the last end."""

    latency: float
    seconds: float


def serve(
    engine: Engine,
    admission: AdmissionPolicy,
    requests: list[Request],
    arrivals: list[float],
    prompts: Prompts,
) -> Served:
    """Run requests as they arrive, on a clock that advances by the measured time of each step."""
    coming, queue = deque(zip(arrivals, range(len(requests)), strict=True)), deque[int]()
    clock = latencies = 0.0
    while coming or queue or not engine.is_idle:
        if engine.is_idle and not queue:
            clock = max(clock, coming[0][0])
        while coming and coming[0][0] <= clock:
            queue.append(coming.popleft()[1])
        while queue and admission.place(queue[0], requests[queue[0]]):
            index = queue.popleft()
            num_input, num_output = requests[index]
            params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
            engine.add_request(as_sequence(index, prompts(num_input, index), params))
        admission.close()
        start = time.perf_counter()
        updates = engine.step()
        clock += time.perf_counter() - start
        for index in (int(update.sequence.attempt_id) for update in updates if update.status.is_finished):
            latencies += (clock - arrivals[index]) / requests[index].num_output
            admission.finish(index)
    engine.check_conservation()
    return Served(latencies / len(requests), clock - arrivals[0])


def sustained_rate(curve: list[tuple[float, float]], bound: float) -> float:
    """Return the highest rate with a latency within the bound, linear between measured ones; 0 if none."""
    rate = max((rate for rate, latency in curve[:1] if latency <= bound), default=0.0)
    for (low, before), (high, after) in pairwise(curve):
        if before <= bound:
            rate = high if after <= bound else low + (high - low) * (bound - before) / (after - before)
    return rate


class Bench(NamedTuple):
    """The values that are the same in all runs."""

    model: LoadedModel
    write: Prompts
    requests: list[Request]

    def serve(self, name: str, arrivals: list[float]) -> Served:
        """Run one system from a fresh start."""
        admissions: dict[str, AdmissionPolicy] = {
            **baselines(NUM_SLOTS, LENGTHS.max_length),
            "quire": Paged(),
        }
        num_blocks = NUM_SLOTS // BLOCK_SIZE
        is_paged = name == "quire"
        engine = make_engine(
            self.model,
            num_blocks if is_paged else 2 * num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            num_swap_blocks=num_blocks if is_paged else 0,
        )
        return serve(engine, admissions[name], self.requests, arrivals, self.write)

    def curve(self, name: str, loads: tuple[float, ...]) -> list[tuple[float, float]]:
        """Return (requests a second, seconds per output token) at parts of the system's capacity."""
        num_requests = len(self.requests)
        capacity = num_requests / self.serve(name, [0.0] * num_requests).seconds
        rates = [capacity * load for load in loads]
        return [(rate, self.serve(name, poisson_arrivals(num_requests, rate)).latency) for rate in rates]


def run(*, quick: bool) -> Result:
    """Measure the latency of each system at several rates."""
    num_requests = 16 if quick else 60
    loads = (0.5, 0.8, 1.2) if quick else (0.4, 0.7, 1.0, 1.4)
    bench = Bench(load_demo(), make_prompts(), LENGTHS.draw(num_requests))
    alone = [Request(40, 85)] * 5
    bench._replace(requests=alone[:1]).serve("quire", [0.0])  # compiles the kernels
    far_apart = [60.0 * index for index in range(len(alone))]
    bound = BOUND * bench._replace(requests=alone).serve("quire", far_apart).latency
    names = [*baselines(NUM_SLOTS, LENGTHS.max_length), "quire"]
    curves = {name: bench.curve(name, loads) for name in progress(names, "request rate")}
    rates = {name: sustained_rate(curve, bound) for name, curve in curves.items()}
    rows = [
        {
            "name": name,
            "rate": rate,
            "ratio": rates["quire"] / rate if rate else None,
            "paper": PAPER.get(name),
        }
        for name, rate in rates.items()
    ]
    columns = {
        "system": "{name}",
        "requests/s": "{rate:.1f}",
        "quire sustains, times": "{ratio:.2f}",
        "paper: vLLM sustains": "{paper}",
    }
    return Result(
        table(f"Requests a second at {1e3 * bound:.1f} ms per output token", rows, columns),
        f"{num_requests} requests; the bound is {BOUND} times the latency of a single request.",
        lambda axes: _draw(axes, curves, bound),
        {"bound_seconds": bound, "sustained": rates, "curves": curves, "num_slots": NUM_SLOTS},
    )


def _draw(axes: Axes, curves: dict[str, list[tuple[float, float]]], bound: float) -> None:
    for name, curve in curves.items():
        rates, latencies = zip(*curve, strict=True)
        axes.plot(rates, [1e3 * latency for latency in latencies], "o-", label=name)
    axes.axhline(1e3 * bound, color="grey", linestyle=":", label="bound")
    axes.set_yscale("log")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("normalized latency, ms per output token")
    axes.legend()
