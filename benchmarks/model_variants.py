"""Compares the step times of one model on the CPU by the type of its weights, the ranks and the threads.

    python -m quire.benchmarks.model_variants --weights float32,bfloat16,w8a8,w4a8,int8,int4 --layouts 1x2
    python -m quire.benchmarks.model_variants --weights float32 --layouts 1x1,2x1,1x2

A layout such as 2x1 is two ranks with one thread each; weights in 8 and 4 bits are measured on one rank only.
All variants are loaded at the same time and take turns, so a disturbance of the machine affects all of them.
Sequences have 128 tokens of context. The table has the medians of the forward passes and the packed weights
of rank 0, each with its ratio to the first variant. The first line has the ceiling of small batches: the time
to read all weights from memory once.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import torch

from quire.benchmarks.harness.engines import as_sequence
from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import CannotRunError, Report, program
from quire.benchmarks.harness.random_llamas import SIZES, random_llama
from quire.benchmarks.harness.rounds import turns
from quire.benchmarks.harness.tables import table
from quire.benchmarks.kernels_cpu import read_bytes_per_second
from quire.engine.engine import Engine
from quire.engine.model.packed_linear import PackedLinear
from quire.llm import LLM
from quire.sampling.params import SamplingParams

BATCHES = (1, 8, 32)
CONTEXT, NUM_STEPS, PROMPT = 128, 24, 512

Weights = Literal["float32", "bfloat16", "w8a8", "w4a8", "int8", "int4"]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: Annotated[str, OneOf(SIZES)] = "100m"
    weights: tuple[Weights, ...] = ("float32", "bfloat16", "w8a8", "w4a8", "int8", "int4")
    layouts: Annotated[tuple[str, ...], "ranks x threads of each"] = ("1x1", "2x1", "1x2")
    rounds: Annotated[int, "rounds; medians count"] = 5


class Variant(NamedTuple):
    """The type of the weights, the ranks of a worker, and the threads of each."""

    weights: Weights
    num_ranks: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.weights}, {self.num_ranks}x{self.num_threads}"

    @property
    def is_quantized(self) -> bool:
        """Whether the weights have 8 or 4 bits."""
        return self.weights not in ("float32", "bfloat16")

    def load(self, model: Path) -> LLM:
        """Load the model."""
        types: Any = {"weight_dtype": self.weights} if self.is_quantized else {"dtype": self.weights}
        return LLM(
            str(model),
            **{"dtype": "float32", **types},
            num_blocks=512,
            threads=self.num_ranks * self.num_threads,
            tensor_parallel_size=self.num_ranks,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=PROMPT,
        )


@program
def main(options: Options) -> Report:
    """Measure all variants."""
    pairs = product(options.weights, options.layouts)
    variants = [Variant(weights, *map(int, layout.split("x"))) for weights, layout in pairs]
    variants = [each for each in variants if each.num_ranks == 1 or not each.is_quantized]
    if not variants:
        raise CannotRunError("quantized weights are not divided among ranks: choose another type or layout")
    rows = measure(random_llama(options.model), variants, options.rounds)
    names = [name for name in rows[0] if name != "variant"]
    for row in rows:
        row["ratios"] = {name: round(rows[0][name] / row[name], 2) for name in names}
    columns = {name: f"{{{name}:.2f}} ({{ratios[{name}]:.2f}})" for name in names}
    title = f"{options.model}: milliseconds and MiB (ratio to the first row)"
    return Report([table(title, rows, {"variant": "{variant}", **columns})], {"rows": rows})


def measure(model: Path, variants: list[Variant], num_rounds: int) -> list[dict[str, Any]]:
    """Return the median milliseconds of each kind of pass, and rank 0's weights, for each variant."""
    with ExitStack() as stack:
        llms = {variant: stack.enter_context(variant.load(model)) for variant in variants}
        times: dict[Variant, dict[str, list[float]]] = {variant: defaultdict(list) for variant in variants}
        for index, variant in turns(variants, num_rounds, warm_up=0):
            # The number of threads belongs to the process, and the variant that was loaded last has set it.
            torch.set_num_threads(variant.num_threads)
            for batch in BATCHES:
                times[variant][f"decode {batch}"] += _decode(llms[variant].engine, batch)
            times[variant][f"prompt of {PROMPT}"] += _steps(llms[variant].engine, [[index + 5] * PROMPT], 1)
        return [
            {
                "variant": str(variant),
                "reading all weights": round(
                    1000 * _reading_seconds(variant, weight_bytes(llms[variant])), 3
                ),
                **{name: round(1000 * median(seconds), 3) for name, seconds in found.items()},
                "weights of rank 0": round(weight_bytes(llms[variant]) / (1 << 20), 1),
            }
            for variant, found in times.items()
        ]


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of the packed weights of all linear layers, with their scales."""
    modules = llm.engine.model.module.modules()
    return sum(each.packed.panels.nbytes for each in modules if isinstance(each, PackedLinear))


def _reading_seconds(variant: Variant, bytes_of_a_rank: int) -> float:
    """Return how long all threads of a variant take to read the weights of all ranks from memory."""
    torch.set_num_threads(variant.num_ranks * variant.num_threads)
    return variant.num_ranks * bytes_of_a_rank / read_bytes_per_second()


def _decode(engine: Engine, batch: int) -> list[float]:
    prompts = [[100 + row] * CONTEXT for row in range(batch)]
    return _steps(engine, prompts, NUM_STEPS)[-NUM_STEPS // 2 :]


def _steps(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Run prompts that get some tokens each; return the seconds of each step's forward pass."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(as_sequence(number, prompt, params))
    seconds = []
    while not engine.is_idle:
        engine.step()
        seconds.append(engine.step_seconds.forward)
    engine.clear_cache()
    return seconds


if __name__ == "__main__":
    main()
