"""Measures the use of KV memory under load, and how many requests fit (the paper's figures 2 and 13).

    python -m quire.benchmarks.paper.memory_use --out benchmarks/results/paper

The pool has the 15.7 thousand token slots of the paper's OPT-13B on one A100. All requests wait from the
start. Steps are measured after the first quarter of the requests has ended, while any request waits. quire's
figures are from its engine with the real scheduler, block pool and block tables. Only the forward pass is
left out, since it does not change the ledger. The baselines' figures are from their allocators, with the same
requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import torch
from matplotlib.figure import Figure

from quire.benchmarks.harness.engines import as_sequence, make_engine, model_without_layers
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.benchmarks.paper.allocators import baselines
from quire.benchmarks.paper.fragmentation import EMPTY, Load, SlotUse, account, is_steady, simulate
from quire.benchmarks.paper.workload import ALPACA, MAX_LENGTH, SHAREGPT, Request
from quire.engine.engine import Engine
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import ScheduledSequence
from quire.sampling.params import SamplingParams

NUM_SLOTS = 15_680
"""Token slots of the pool: 980 blocks of 16."""
BLOCK_SIZES = (16, 8, 4)
PAPER_EFFECTIVE = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "quire, block 16": 96.3}
"""Percent of slots with token states in figure 2; quire is compared with vLLM."""
PAPER_RUNNING = {
    "ShareGPT-like": {
        "Orca (Max)": 7.00,
        "Orca (Pow2)": 9.81,
        "Orca (Oracle)": 13.62,
        "quire, block 16": 30.42,
    },
    "Alpaca-like": {
        "Orca (Max)": 7.00,
        "Orca (Pow2)": 43.24,
        "Orca (Oracle)": 72.75,
        "quire, block 16": 132.44,
    },
}
"""Requests in a batch in figure 13, at 2 and 30 requests a second; here the queue is full instead."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    quick: Annotated[bool, "fewer requests: less than a minute, rougher"] = False


class MeasuringRunner:
    """Replaces the forward pass: samples token 0 everywhere, and reads the ledger in the middle of a step."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._logits = torch.tensor([1.0, 0.0]).expand(engine.scheduler.config.max_num_seqs, 2)
        self.load = EMPTY

    def move_blocks(self, schedule: Schedule) -> None:
        """Do nothing, since the blocks have no content."""

    def prepare(self, scheduled: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the batch as it is."""
        return scheduled

    def forward(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        """Return logits; measure in the steady part of the run."""
        num_ended = len(self._requests) - len(self._engine.groups)
        if self._engine.queues.waiting and is_steady(num_ended, len(self._requests)):
            use = self._slot_use(scheduled)
            self.load = self.load.after(use, len(self._engine.queues.running))
        return self._logits[: len(scheduled)]

    def hidden_states(self, scheduled: list[ScheduledSequence]) -> None:
        """Return None, since no request asks for an embedding."""

    def _slot_use(self, scheduled: list[ScheduledSequence]) -> SlotUse:
        """Count the slots' uses in the block tables. Tokens of this step count as written."""
        writes = {id(sequence): num_tokens for sequence, num_tokens in scheduled}
        block_size, pool = self._engine.memory.shape.block_size, self._engine.pool
        sequences = [s for group in self._engine.groups.values() for s in group.sequences if s.block_table]
        tables = list(chain.from_iterable(s.block_table for s in sequences))
        assert len(tables) == len(set(tables)) == pool.counts.used, "blocks are shared or have leaked"
        kept = (
            (
                len(s.block_table) * block_size,
                s.num_computed_tokens + writes.get(id(s), 0),
                sum(self._requests[int(s.attempt_id)]),
            )
            for s in sequences
        )
        return account(kept, pool.num_blocks * block_size)


def measure_engine(requests: list[Request], num_slots: int, block_size: int) -> Load:
    """Run requests that all wait from the start through the engine."""
    model = model_without_layers(MAX_LENGTH)
    engine = make_engine(
        model,
        num_slots // block_size,
        block_size=block_size,
        max_num_seqs=1024,
        max_num_batched_tokens=MAX_LENGTH,
    )
    runner = MeasuringRunner(engine, requests)
    engine.runner = runner  # type: ignore[assignment]
    for index, (num_input, num_output) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        engine.add_request(as_sequence(index, [0] * num_input, params))
    while engine.queues.waiting:
        engine.step()
    return runner.load


@program
def main(options: Options) -> Report:
    """Measure every allocator on both data sets."""
    sizes = (300, 2000) if options.quick else (1000, 6000)
    loads: dict[str, dict[str, Load]] = {}
    for lengths, num_requests in zip((SHAREGPT, ALPACA), sizes, strict=True):
        requests = lengths.draw(num_requests)
        of = loads[lengths.name] = {}
        for name, admission in baselines(NUM_SLOTS, MAX_LENGTH).items():
            of[name] = simulate(admission, requests, NUM_SLOTS)
        for block_size in BLOCK_SIZES:
            show_progress(f"{lengths.name}: blocks of {block_size}")
            of[f"quire, block {block_size}"] = measure_engine(requests, NUM_SLOTS, block_size)
    rows = [
        {
            "data": data,
            "name": name,
            **dict(zip(SlotUse._fields, load.use.percent, strict=True)),
            "paper": PAPER_EFFECTIVE.get(name) if data == SHAREGPT.name else None,
            "running": load.mean_running,
            "paper_running": PAPER_RUNNING[data].get(name),
        }
        for data, of in loads.items()
        for name, load in of.items()
        if load.num_steps
    ]
    columns = {
        "lengths": "{data}",
        "allocator": "{name}",
        "token states %": "{states:.1f}",
        "paper (ShareGPT)": "{paper}",
        "reserved %": "{reserved:.1f}",
        "internal %": "{internal:.1f}",
        "external %": "{external:.1f}",
        "at once": "{running:.1f}",
        "paper": "{paper_running:.1f}",
    }
    title = f"KV memory by use, and requests at once, under a full queue: {NUM_SLOTS} token slots"
    return Report(
        [table(title, rows, columns)],
        {"num_slots": NUM_SLOTS, "rows": rows},
        {"memory_use.png": _draw(loads)},
    )


def _draw(loads: dict[str, dict[str, Load]]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    bars = [(f"{name}\n{data}", load) for data, of in loads.items() for name, load in of.items()]
    names = [name for name, _ in bars]
    left = [0.0] * len(bars)
    for use, label in enumerate(SlotUse._fields):
        values = [load.use.percent[use] for _, load in bars]
        axes.barh(names, values, left=left, label="token states" if label == "states" else label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("percent of the pool's slots")
    axes.legend(fontsize=7, loc="upper center", ncols=len(SlotUse._fields), bbox_to_anchor=(0.5, -0.12))
    return figure


if __name__ == "__main__":
    main()
