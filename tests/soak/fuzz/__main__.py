"""Send random requests to a stack with two decode workers: every answer must be right or an error.

python -m tests.soak.fuzz --seconds 600 --seed 1

Half of the requests go over gRPC and half over HTTP, with usual and extreme values of every field. One in ten
clients leaves early. With --hostile 40 --nginx, 40 connections flood both ports all the time, and all clients
go through nginx. At the end each worker must be the process that it was, hold no block and have kept its
memory, and a sample of the requests, sent again one at a time, must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from rich.console import Console
from rich.table import Table

from tests.soak.fuzz.run import FuzzReport, fuzz


def main() -> None:
    """Run, print a table of what became of the requests, and exit 1 if there is a defect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of sending (default 600)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (default 1)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way (default 16)")
    parser.add_argument("--requests", type=int, default=sys.maxsize, help="end after this many")
    parser.add_argument("--hostile", type=int, default=0, help="connections that flood the ports (default 0)")
    parser.add_argument("--nginx", action="store_true", help="put nginx in front, as in deploy/nginx")
    arguments = parser.parse_args()
    report = asyncio.run(
        fuzz(
            arguments.seed,
            arguments.seconds,
            arguments.concurrency,
            arguments.requests,
            is_quiet=False,
            num_hostile=arguments.hostile,
            has_nginx=arguments.nginx,
        )
    )
    print_report(report)
    sys.exit(1 if report.defects else 0)


def print_report(report: FuzzReport) -> None:
    """Print what became of the requests, then the figures as a line of JSON."""
    console = Console(width=110)
    table = Table("door", "outcome", "requests", title=f"seed {report.seed}, {report.seconds:.0f} s")
    for (door, outcome), count in sorted(report.outcomes.items()):
        table.add_row(door, outcome, str(count))
    console.print(table)
    memory = Table("process", "MiB after warm-up", "most", "MiB at the end", title="resident memory")
    for name, (before, after) in sorted(report.memory_mib.items()):
        memory.add_row(name, f"{before:.0f}", f"{report.peak_mib.get(name, after):.0f}", f"{after:.0f}")
    console.print(memory)
    console.print(f"{report.num_repeated} requests sent again: {report.num_different} gave other tokens")
    gaps_ms = [1000 * gap for gap in sorted(report.gaps) or [0.0]]
    p99_ms = gaps_ms[int(0.99 * (len(gaps_ms) - 1))]
    console.print(f"between messages of a stream: p99 {p99_ms:.0f} ms, maximum {gaps_ms[-1]:.0f} ms")
    for defect in report.defects:
        console.print(f"DEFECT {defect}", soft_wrap=True, markup=False)
    print(
        json.dumps(
            {
                "benchmark": "fuzz",
                "seed": report.seed,
                "seconds": round(report.seconds),
                "requests": sum(report.outcomes.values()),
                "outcomes": {" ".join(key): count for key, count in sorted(report.outcomes.items())},
                "memory_mib": report.memory_mib,
                "peak_mib": report.peak_mib,
                "message_gap_p99_ms": round(p99_ms),
                "repeated": report.num_repeated,
                "different": report.num_different,
                "defects": len(report.defects),
            }
        )
    )


if __name__ == "__main__":
    main()
