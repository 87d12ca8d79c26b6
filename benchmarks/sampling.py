"""The time to sample a step's tokens on the CPU, beside sorting each row with torch's operators.

    python -m quire.benchmarks.sampling

Both ways draw the same tokens from the same logits, which are normally distributed, and mostly scaled by 4 so
that few tokens are probable, as in language models. The ceiling is the time to read the logits once, in
torch's sum. Times are the processor time of one thread, since others may use the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch

from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.tables import table
from quire.engine.sequences import sampler
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    seconds: Annotated[float, "length of each measurement"] = 0.3


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


def mean_seconds(run: Callable[[], Any], seconds: float) -> float:
    """Return this thread's processor time for a run, the mean of many, since its clock may be coarse."""
    run()
    num_runs, start, end = 0, time.thread_time(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        run()
        num_runs += 1
    return (time.thread_time() - start) / num_runs


def measure(shape: Shape, seconds: float) -> list[dict[str, Any]]:
    """Time each kind of sampling both ways, and the ceiling, in microseconds."""
    logits = torch.randn(shape.rows, shape.vocab) * shape.scale
    ceiling = mean_seconds(lambda: logits.sum(), seconds) * 1e6
    rows = []
    for kind, values in KINDS.items():
        sequences = [
            Sequence("benchmark", [0], 1, SamplingParams(seed=row, **values), b"")
            for row in range(shape.rows)
        ]

        def kernel(sequences: list[Sequence] = sequences) -> list[int]:
            return sampler.sample(logits, sequences, frozenset()).token_ids

        def sort(sequences: list[Sequence] = sequences) -> list[int]:
            return sampler._choose_with_torch(logits, logits, sequences)

        times = {
            "kernel_us": mean_seconds(kernel, seconds) * 1e6,
            "sorted_us": mean_seconds(sort, seconds) * 1e6,
        }
        num_equal = sum(a == b for a, b in zip(kernel(), sort(), strict=True))
        ratio = times["sorted_us"] / times["kernel_us"]
        counts = {"ratio": ratio, "ceiling_us": ceiling, "equal_tokens": num_equal, "rows": shape.rows}
        rows.append({"shape": str(shape), "kind": kind, **times, **counts})
    return rows


@program
def main(options: Options) -> Report:
    """Measure all shapes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for shape in SHAPES for row in measure(shape, options.seconds)]
    columns = {
        "logits": "{shape}",
        "kind": "{kind}",
        "µs": "{kernel_us:.0f}",
        "sorted µs": "{sorted_us:.0f}",
        "ratio": "{ratio:.1f}",
        "read µs (ceiling)": "{ceiling_us:.0f}",
        "equal": "{equal_tokens} of {rows}",
    }
    return Report([table("Sampling on one thread", rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
