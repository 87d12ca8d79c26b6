"""Step times and memory of a model on one process and on several, side by side.

    python -m quire.benchmarks.tensor_parallel
    python -m quire.benchmarks.tensor_parallel --layouts 1x1,2x1,4x1 --dtypes float32 --rounds 5

A layout such as 2x1 is two ranks with one thread each. All layouts of a data type are loaded at a time and
take turns, so that a disturbance of the machine meets all of them. The model is a random Llama of 100 M
parameters, and sequences have 128 tokens of context. The tables have the medians of the forward passes and
the packed weights of rank 0, each with its ratio to the first layout. The ceiling of small batches comes
first: the time to read all weights from memory once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from quire.benchmarks.kernels_cpu import read_bytes_per_second
from quire.benchmarks.peers.random_llamas import SIZES, make_random_llama
from quire.benchmarks.weight_dtypes import weight_bytes
from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from quire.llm import LLM
from quire.sampling.params import SamplingParams

BATCHES = (1, 8, 32)
READING = "reading all weights"
CONTEXT, NUM_STEPS, PROMPT = 128, 24, 512
MODEL = "100m"


class Layout(NamedTuple):
    """Ranks of a worker, and the threads of each."""

    num_ranks: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.num_ranks}x{self.num_threads}"


def main() -> None:
    """Measure each data type, print its table, and then the line."""
    parser = argparse.ArgumentParser(prog="python -m quire.benchmarks.tensor_parallel", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layouts", default="1x1,2x1,1x2", help="ranks x threads of each")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    layouts = [Layout(*map(int, each.split("x"))) for each in options.layouts.split(",")]
    report = {}
    with TemporaryDirectory() as folder:
        model = make_random_llama(Path(folder) / "model", SIZES[MODEL])
        for dtype in options.dtypes.split(","):
            rows = _measured(model, dtype, layouts, options.rounds)
            Console().print(_table(dtype, rows))
            report[dtype] = rows
    print(json.dumps({"benchmark": "tensor_parallel", "model": MODEL, "milliseconds": report}))


def _measured(model: Path, dtype: str, layouts: list[Layout], num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each kind of pass, and rank 0's weights, for each layout."""
    with ExitStack() as stack:
        llms = {layout: stack.enter_context(_open(model, dtype, layout)) for layout in layouts}
        times: dict[Layout, dict[str, list[float]]] = {layout: defaultdict(list) for layout in layouts}
        for round_number in range(num_rounds):
            for layout, llm in llms.items():
                # This number belongs to the process, and the last layout to be loaded has set its own.
                torch.set_num_threads(layout.num_threads)
                for batch in BATCHES:
                    times[layout][f"decode {batch}"] += _decode(llm.engine, batch)
                prompt = [[round_number + 5] * PROMPT]
                times[layout][f"prompt of {PROMPT}"] += _steps(llm.engine, prompt, 1)
        return {
            str(layout): {READING: round(1000 * _reading_seconds(layout, weight_bytes(llms[layout])), 3)}
            | {name: round(1000 * median(seconds), 3) for name, seconds in found.items()}
            | {"weights of rank 0 in MiB": round(weight_bytes(llms[layout]) / (1 << 20), 1)}
            for layout, found in times.items()
        }


def _reading_seconds(layout: Layout, bytes_of_a_rank: int) -> float:
    """Return how long all threads of a layout take to read the weights of all ranks from memory."""
    torch.set_num_threads(layout.num_ranks * layout.num_threads)
    return layout.num_ranks * bytes_of_a_rank / read_bytes_per_second()


def _open(model: Path, dtype: Any, layout: Layout) -> LLM:
    return LLM(
        str(model),
        dtype=dtype,
        num_blocks=512,
        threads=layout.num_ranks * layout.num_threads,
        tensor_parallel_size=layout.num_ranks,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=PROMPT,
    )


def _decode(engine: Engine, batch: int) -> list[float]:
    prompts = [[100 + row] * CONTEXT for row in range(batch)]
    return _steps(engine, prompts, NUM_STEPS)[-NUM_STEPS // 2 :]


def _steps(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Run prompts that get some tokens each; return the seconds of each step's forward pass."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(Sequence(str(number), prompt, len(prompt), params, b""))
    seconds = []
    while not engine.is_idle:
        engine.step()
        seconds.append(engine.step_seconds.forward)
    engine.clear_cache()
    return seconds


def _table(dtype: str, rows: dict[str, dict[str, float]]) -> Table:
    first = next(iter(rows.values()))
    names = [name if "MiB" in name else f"{name} (ms)" for name in first]
    table = Table("ranks x threads", *names, title=dtype)
    for layout, row in rows.items():
        table.add_row(layout, *(f"{value:.2f} ({first[name] / value:.2f})" for name, value in row.items()))
    return table


if __name__ == "__main__":
    main()
