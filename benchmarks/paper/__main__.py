"""Reproduce the tables of PagedAttention (Kwon et al., SOSP 2023).

    python -m quire.benchmarks.paper
    python -m quire.benchmarks.paper memory_use sharing --quick

Each experiment prints a table with the paper's numbers beside ours and writes a picture and raw JSON. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console

from quire.benchmarks.paper import (
    block_sizes,
    memory_use,
    prefix_cache,
    request_rate,
    sharing,
    swap_or_recompute,
)
from quire.benchmarks.paper.report import save, show

EXPERIMENTS = {
    "memory_use": memory_use.run,
    "sharing": sharing.run,
    "prefix_cache": prefix_cache.run,
    "block_sizes": block_sizes.run,
    "swap_or_recompute": swap_or_recompute.run,
    "request_rate": request_rate.run,
}
RESULTS = Path("benchmarks/results/paper")


def main() -> None:
    """Run the experiments that are asked for, or all."""
    parser = argparse.ArgumentParser(prog="python -m quire.benchmarks.paper", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    parser.add_argument("--quick", action="store_true", help="fewer requests: less than a minute, rougher")
    parser.add_argument("--threads", type=int, default=2, help="of torch and the kernels (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"no experiment is called {sorted(unknown)}; there are: {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(arguments.threads)
    console = Console()
    seconds = {}
    for name in arguments.experiments or EXPERIMENTS:
        start = time.perf_counter()
        result = EXPERIMENTS[name](quick=arguments.quick)
        seconds[name] = round(time.perf_counter() - start, 1)
        show(result, console)
        save(result, arguments.out)
    print(json.dumps({"bench": "paper", "quick": arguments.quick, "seconds": seconds}))


if __name__ == "__main__":
    main()
