"""Elastic roles beside each fixed split of four simulated workers, under a load that turns.

    python -m quire.benchmarks.elastic_roles [--seconds 120] [--rounds 3] [--ttft 1] [--tpot 0.025]

First come long prompts with short answers, then short prompts with long answers. The controller of the router
changes the roles of the workers. Prints the goodput of each phase, and of the first seconds after its begin
apart, in requests per second that met both targets; one JSON line last. Everything is simulated, with the
calibration of the demo model (``simulator/demo.json``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from quire.routing.pressure import Targets
from quire.simulator.calibration import demo_calibration
from quire.simulator.cluster import ClusterConfig, Replay, RequestOutcome, replay
from quire.simulator.figures import Slo, is_good
from quire.simulator.trace import TraceRequest
from quire.simulator.workload import Workload, make_requests

NUM_WORKERS = 4
TURN_SECONDS = 20.0
"""Length of the part of a phase that counts as the turn."""
MAX_REQUESTS = 100_000
BLOCK_TOKENS = 16


class Phase(NamedTuple):
    """Requests of one kind."""

    name: str
    rate: float
    input_tokens: int
    output_tokens: int


PHASES = (Phase("long prompts", 12.0, 1024, 16), Phase("long answers", 7.0, 128, 256))
CASES = ((1, False), (2, False), (3, False), (0, False), (2, True))
"""Number of prefill workers at the beginning, and whether roles are elastic."""


def main() -> None:
    """Simulate all cases, print the table and the line."""
    parser = argparse.ArgumentParser(prog="python -m quire.benchmarks.elastic_roles", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=120.0, help="length of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="replays with other arrivals; medians count")
    parser.add_argument("--ttft", type=float, default=1.0, help="target for the first token, in seconds")
    parser.add_argument("--tpot", type=float, default=0.025, help="target for each further token, in seconds")
    options = parser.parse_args()
    targets = Targets(options.ttft, options.tpot)
    rows = [
        _row(num_prefill, is_elastic, targets, options.seconds, options.rounds)
        for num_prefill, is_elastic in CASES
    ]
    Console().print(_table(rows))
    report = {"benchmark": "elastic_roles", "targets": targets._asdict(), "seconds": options.seconds}
    print(json.dumps({**report, "phases": [phase._asdict() for phase in PHASES], "rows": rows}))


def turning_load(seconds: float, seed: int) -> list[TraceRequest]:
    """Return the requests of all phases, which follow each other; no two requests share a block."""
    requests: list[TraceRequest] = []
    for index, phase in enumerate(PHASES):
        made = make_requests(
            Workload.UNIQUE,
            int(seconds * phase.rate * 2),
            phase.rate,
            seed * len(PHASES) + index,
            input_tokens=phase.input_tokens,
            output_tokens=phase.output_tokens,
            block_tokens=BLOCK_TOKENS,
        )
        begin, first_id = index * seconds, index << 40
        requests += [
            request._replace(
                arrival_seconds=begin + request.arrival_seconds,
                block_ids=tuple(first_id + block_id for block_id in request.block_ids),
            )
            for request in made
            if request.arrival_seconds < seconds
        ]
    return requests


def run(num_prefill: int, targets: Targets | None, seconds: float, seed: int) -> Replay:
    """Replay the load; with targets, the roles of the workers are elastic."""
    config = ClusterConfig(
        num_prefill=num_prefill,
        num_decode=NUM_WORKERS - num_prefill,
        max_requests=MAX_REQUESTS,
        elastic=targets,
        seed=seed,
    )
    return replay(config, demo_calibration().scaled_blocks(BLOCK_TOKENS), turning_load(seconds, seed))


def goodput(outcomes: Sequence[RequestOutcome], targets: Targets, begin: float, end: float) -> float:
    """Return the requests per second that arrived in a period and met both targets."""
    slo = Slo(targets.ttft_seconds, targets.tpot_seconds)
    good = [o for o in outcomes if begin <= o.request.arrival_seconds < end and is_good(o, slo)]
    return len(good) / (end - begin)


def _row(num_prefill: int, is_elastic: bool, targets: Targets, seconds: float, rounds: int) -> dict[str, Any]:
    runs = [run(num_prefill, targets if is_elastic else None, seconds, seed) for seed in range(rounds)]

    def mid(begin: float, end: float) -> float:
        return round(median(goodput(each.outcomes, targets, begin, end) for each in runs), 2)

    split = f"{num_prefill}P{NUM_WORKERS - num_prefill}D" if num_prefill else f"{NUM_WORKERS} colocated"
    begins = [index * seconds for index in range(len(PHASES))]
    return {
        "split": f"elastic, from {split}" if is_elastic else split,
        "goodput": [mid(begin, begin + seconds) for begin in begins],
        "turn": [mid(begin, begin + TURN_SECONDS) for begin in begins],
        "settled": [mid(begin + TURN_SECONDS, begin + seconds) for begin in begins],
        "changes": [
            [(round(at, 1), worker, role) for at, worker, role in each.role_changes] for each in runs
        ],
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("split", title="requests per second that met both targets", title_justify="left")
    for phase in PHASES:
        table.add_column(f"{phase.name} ({phase.rate:g}/s)", justify="right")
        table.add_column(f"first {TURN_SECONDS:g} s", justify="right")
        table.add_column("rest", justify="right")
    for row in rows:
        parts = zip(row["goodput"], row["turn"], row["settled"], strict=True)
        table.add_row(row["split"], *(f"{value:.2f}" for part in parts for value in part))
    return table


if __name__ == "__main__":
    main()
