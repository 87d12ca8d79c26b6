"""Repeats the measurements of PagedAttention (Kwon et al., SOSP 2023).

    python -m quire.benchmarks.paper --out benchmarks/results/paper
    python -m quire.benchmarks.paper memory_use sharing --quick

Each experiment prints a table with our numbers and the paper's, and draws a picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.paper import memory_use, request_rate, sharing

EXPERIMENTS = {"memory_use": memory_use.run, "sharing": sharing.run, "request_rate": request_rate.run}


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    experiments: Annotated[tuple[str, ...], OneOf(EXPERIMENTS), "experiments to run; all if none is named:"]
    quick: Annotated[bool, "fewer requests: less than a minute, rougher"] = False
    threads: Annotated[int, "threads of torch and the kernels"] = 2


@program
def main(options: Options) -> Report:
    """Run the experiments that are named, or all."""
    torch.set_num_threads(options.threads)
    results = {name: EXPERIMENTS[name](quick=options.quick) for name in options.experiments or EXPERIMENTS}
    return Report(
        [each for result in results.values() for each in (result.table, result.notes)],
        {"results": {name: result.raw for name, result in results.items()}},
        {f"{name}.png": result.picture() for name, result in results.items()},
    )


if __name__ == "__main__":
    main()
