"""The time to sample a step's tokens on the CPU, beside sorting each row with torch's operators.

    python -m quire.benchmarks.sampling

Both ways draw the same tokens from the same logits, which are normally distributed, and mostly scaled by 4 so
that few tokens are probable, as in language models. The ceiling is the time to read the logits once, in
torch's sum. Times are the processor time of one thread, since others may use the machine. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from quire.engine.sequences import sampler
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams

SECONDS = 0.3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}


class Shape(NamedTuple):
    """A step's logits; with a small ``scale``, most of the vocabulary is probable."""

    rows: int
    vocab: int
    scale: float

    def __str__(self) -> str:
        return f"{self.rows} x {self.vocab}, scale {self.scale:g}"


SHAPES = (
    Shape(1, 4096, 4.0),
    Shape(64, 4096, 4.0),
    Shape(1, 152_064, 4.0),
    Shape(64, 152_064, 4.0),
    Shape(64, 152_064, 1.0),
)


def mean_seconds(run: Callable[[], Any]) -> float:
    """Return this thread's processor time for a run, the mean of many, since its clock may be coarse."""
    run()
    num_runs, start, end = 0, time.thread_time(), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        run()
        num_runs += 1
    return (time.thread_time() - start) / num_runs


def measure(shape: Shape) -> dict[str, Any]:
    """Time each kind of sampling both ways, and the ceiling, in microseconds."""
    logits = torch.randn(shape.rows, shape.vocab) * shape.scale
    result: dict[str, Any] = {"ceiling_us": mean_seconds(lambda: logits.sum()) * 1e6, "kinds": {}}
    for kind, values in KINDS.items():
        sequences = [
            Sequence("benchmark", [0], 1, SamplingParams(seed=row, **values), b"")
            for row in range(shape.rows)
        ]

        def kernel(sequences: list[Sequence] = sequences) -> list[int]:
            return sampler.sample(logits, sequences, frozenset()).token_ids

        def sort(sequences: list[Sequence] = sequences) -> list[int]:
            return sampler._choose_with_torch(logits, logits, sequences)

        num_equal = sum(a == b for a, b in zip(kernel(), sort(), strict=True))
        result["kinds"][kind] = {
            "kernel_us": mean_seconds(kernel) * 1e6,
            "sorted_us": mean_seconds(sort) * 1e6,
            "equal_tokens": num_equal,
        }
    return result


def main() -> None:
    """Print the table and the line of JSON."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = Table("logits", "kind", "µs", "sorted µs", "ratio", "read µs", "equal", title="one thread")
    results = {}
    for shape in SHAPES:
        results[str(shape)] = result = measure(shape)
        for kind, times in result["kinds"].items():
            table.add_row(
                str(shape),
                kind,
                f"{times['kernel_us']:.0f}",
                f"{times['sorted_us']:.0f}",
                f"{times['sorted_us'] / times['kernel_us']:.1f}",
                f"{result['ceiling_us']:.0f}",
                f"{times['equal_tokens']} of {shape.rows}",
            )
    Console().print(table)
    print(json.dumps({"bench": "sampling", "threads": 1, "results": results}))


if __name__ == "__main__":
    main()
