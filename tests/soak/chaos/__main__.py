"""Break a cluster in every way of a random schedule, under load: every answer must be right or a clear error.

python -m tests.soak.chaos --faults 300 --seed 1 --variant tiers --log chaos.jsonl
python -m tests.soak.chaos --rolling              # restarts every worker and then every router
python -m tests.soak.chaos --faults 120 --pause 60    # two hours

The cluster has routers, two prefill and two decode workers and a private Redis, each a process. The schedule
kills, stops and restarts processes, spoils Redis and disks, and cuts, delays, resets and damages connections.
Each request has an answer that was learned before the first fault. At the end, when all is healed, no block
may be in use, no request in flight, and no process may have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import quantiles

from rich.console import Console
from rich.table import Table

from tests.soak.chaos.cluster import ClusterConfig
from tests.soak.chaos.commands import VARIANTS
from tests.soak.chaos.journal import Journal
from tests.soak.chaos.run import ChaosConfig, ChaosReport, run_chaos
from tests.soak.chaos.schedule import MEAN_PAUSE


def main() -> None:
    """Run, print tables and a line of JSON, and exit 1 if something happened that must not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="number of faults (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of faults and requests (default 1)")
    parser.add_argument(
        "--rolling", action="store_true", help="restart all workers and then all routers, one after the other"
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=MEAN_PAUSE,
        help="mean seconds between two faults (default %(default)s)",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after this time")
    parser.add_argument("--variant", choices=VARIANTS, default="plain", help="of the workers (default plain)")
    parser.add_argument("--routers", type=int, default=2, help="number of routers (default 2)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (default 8)")
    parser.add_argument("--log", type=Path, help="file for every fault, request and line of output")
    arguments = parser.parse_args()
    config = ChaosConfig(
        seed=arguments.seed,
        num_faults=arguments.faults,
        is_rolling=arguments.rolling,
        mean_pause_seconds=arguments.pause,
        minutes=arguments.minutes,
        concurrency=arguments.concurrency,
        cluster=ClusterConfig(variant=arguments.variant, num_routers=arguments.routers),
    )
    with arguments.log.open("w") if arguments.log else nullcontext() as file:
        report = asyncio.run(run_chaos(config, Journal(file), Console(stderr=True)))
    print_report(report)
    sys.exit(1 if report.defects else 0)


def print_report(report: ChaosReport) -> None:
    """Print tables of faults, requests, times and memory, then the figures as a line of JSON."""
    console = Console(width=110)
    faults = Table("fault", "number", title=f"seed {report.config.seed}, {report.seconds:.0f} s")
    for kind, count in sorted(report.faults.items()):
        faults.add_row(kind, str(count))
    console.print(faults)
    outcomes = sorted({outcome for _, outcome in report.load.outcomes})
    requests = Table("request", *outcomes, title="requests by outcome")
    for kind in sorted({kind for kind, _ in report.load.outcomes}):
        requests.add_row(kind, *(str(report.load.outcomes[kind, outcome]) for outcome in outcomes))
    console.print(requests)
    console.print(
        f"p50 and p99 of whole answers: {_times(report.undisturbed.seconds)} without faults, "
        f"{_times(report.load.seconds)} with them"
    )
    for name, (before, after) in sorted(report.memory_mib.items()):
        console.print(f"{name}: {before:.0f} MiB after the first tenth, {after:.0f} MiB at the end")
    for defect in report.defects:
        console.print(f"DEFECT {defect}", soft_wrap=True, markup=False)
    print(json.dumps(_figures(report)))


def _figures(report: ChaosReport) -> dict[str, object]:
    totals = Counter[str]()
    for (_, outcome), count in report.load.outcomes.items():
        totals[outcome] += count
    return {
        "benchmark": "chaos",
        "seed": report.config.seed,
        "variant": report.config.cluster.variant,
        "routers": report.config.cluster.num_routers,
        "seconds": round(report.seconds),
        "faults": dict(sorted(report.faults.items())),
        "num_faults": report.faults.total(),
        "requests": report.load.outcomes.total(),
        "outcomes": dict(totals.most_common()),
        "retried": report.load.num_retried,
        "p50_p99_ms": {
            "without_faults": _percentiles_ms(report.undisturbed.seconds),
            "with_faults": _percentiles_ms(report.load.seconds),
        },
        "memory_mib": report.memory_mib,
        "defects": report.defects,
    }


def _percentiles_ms(seconds: list[float]) -> list[int]:
    if len(seconds) < 2:
        return []
    hundredths = quantiles(seconds, n=100, method="inclusive")
    return [round(1000 * hundredths[49]), round(1000 * hundredths[98])]


def _times(seconds: list[float]) -> str:
    return " and ".join(f"{each} ms" for each in _percentiles_ms(seconds)) or "no times"


if __name__ == "__main__":
    main()
