"""Compares requests that all have different adapters with the same requests without adapters, in one run.

    python -m quire.benchmarks.adapters --adapters 16 --rank 16

The base model is the ceiling. No prompt finds blocks of an earlier one. Adapters have all linear layers.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, NamedTuple

from quire.benchmarks.harness.options import AtLeast
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_adapters import make_adapter
from quire.benchmarks.harness.random_llamas import CACHE, random_llama
from quire.benchmarks.harness.rounds import show_progress, turns
from quire.benchmarks.harness.tables import table
from quire.llm import LLM, SamplingParams

_SIDES = ("base", "one adapter", "different adapters")


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: Annotated[str, "size of a random Llama"] = "100m"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    adapters: Annotated[int, "number of adapters, and of requests in a batch"] = 16
    rank: int = 16
    rounds: Annotated[int, AtLeast(1)] = 7
    threads: int = 2
    ranks: Annotated[int, "processes that divide the model, and the threads"] = 1


class Case(NamedTuple):
    """Requests of one kind."""

    name: str
    prompt_tokens: int
    answer_tokens: int


CASES = (Case("requests", 64, 64), Case("answers", 4, 64), Case("prompts", 64, 1))


class Row(NamedTuple):
    """Seconds of a batch on each side, and the seconds of the base model divided by those with adapters."""

    case: str
    base: float
    one_adapter: float
    different_adapters: float
    one_adapter_ratio: float
    ratio: float


@program
def main(options: Options) -> Report:
    """Measure each kind of requests."""
    folder = random_llama(options.model, CACHE)
    with TemporaryDirectory() as adapters:
        names = [f"adapter-{seed}" for seed in range(options.adapters)]
        lora = {
            name: str(make_adapter(Path(adapters) / name, folder, seed=seed, rank=options.rank, size=0.01))
            for seed, name in enumerate(names)
        }
        num_blocks = 32 * options.adapters
        with LLM(
            str(folder),
            dtype=options.dtype,
            num_blocks=num_blocks,
            threads=options.threads,
            tensor_parallel_size=options.ranks,
            lora=lora,
        ) as llm:
            models = dict(zip(_SIDES, ([""] * len(names), names[:1] * len(names), names), strict=True))
            rows = [_measure(llm, case, models, options.rounds) for case in CASES]
    columns = {
        "": "{case}",
        "base (s)": "{base:.2f}",
        "one adapter (s)": "{one_adapter:.2f}",
        "base / one adapter": "{one_adapter_ratio:.2f}",
        "different adapters (s)": "{different_adapters:.2f}",
        "base / different adapters": "{ratio:.2f}",
    }
    return Report([table("adapters", rows, columns)], {"rows": rows})


def _measure(llm: LLM, case: Case, models: dict[str, list[str]], num_rounds: int) -> Row:
    draw = random.Random(0)
    rounds: dict[int, dict[str, float]] = defaultdict(dict)
    for number, side in turns(models, num_rounds):
        prompts = [[draw.randrange(2, 1000) for _ in range(case.prompt_tokens)] for _ in models[side]]
        seconds = _seconds(llm, prompts, models[side], case.answer_tokens)
        show_progress(f"{case.name}, round {number + 1}, {side}: {seconds:.2f} s")
        if number >= 0:
            rounds[number][side] = seconds
    times = [[each[side] for side in _SIDES] for each in rounds.values()]
    ratios = [[base / one, base / different] for base, one, different in times]
    return Row(case.name, *map(median, zip(*times, strict=True)), *map(median, zip(*ratios, strict=True)))


def _seconds(llm: LLM, prompts: Sequence[list[int]], models: list[str], num_tokens: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, model=models, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
