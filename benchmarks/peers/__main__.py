"""Measures the tokens per second of quire, vLLM, llama.cpp and transformers on this CPU, in turns.

    python -m quire.benchmarks.peers --install        # once: virtual environments of vLLM and llama.cpp
    python -m quire.benchmarks.peers
    python -m quire.benchmarks.peers --models 7m --dtypes float32,w8a8 --workloads mixed,one-stream --rounds 5
    python -m quire.benchmarks.peers --sides quire,llama.cpp --gguf model.Q4_0.gguf
    python -m quire.benchmarks.peers --sides quire,vllm --models gemma3_text,qwen3_moe

Each side is a process that loads the model once, and is stopped (SIGSTOP) while it is another side's turn. A
round runs a workload on each side in turn. Each round begins with another side. Before the first round, each
side runs the workload once. The tables have the medians of tokens per second, and how many times faster quire
is. ``prefill`` counts tokens of prompts, the others tokens of answers. transformers runs a static batch until
its longest answer ends. Answers are greedy; ``first tokens`` is the share of answers whose first token is
quire's. A side that cannot run here is named with the reason. The folder gets the environments, the models
and a log of each side. vLLM needs Debian's packages libtcmalloc-minimal4 and numactl.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

from quire.benchmarks.harness.options import AtLeast, OneOf
from quire.benchmarks.harness.program import CannotRunError, Report, program
from quire.benchmarks.harness.random_llamas import CACHE
from quire.benchmarks.harness.rounds import medians, show_progress
from quire.benchmarks.peers.environments import (
    MODULES,
    command,
    environment_variables,
    install,
    is_installed,
)
from quire.benchmarks.peers.models import MODELS_HELP, random_model
from quire.benchmarks.peers.processes import Answer, SideFailedError, SideProcess
from quire.benchmarks.peers.rounds import Comparison, ratios, report_all, run_rounds
from quire.benchmarks.peers.sides.protocol import Dtype, Setup
from quire.benchmarks.peers.workloads import WORKLOADS, Requests, Workload, setup_for
from quire.models.gguf_header import read_header


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    sides: Annotated[tuple[str, ...], OneOf(MODULES)] = tuple(MODULES)
    models: Annotated[tuple[str, ...], MODELS_HELP] = ("7m", "100m")
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    gguf: Annotated[tuple[Path, ...], "GGUF files instead of models and dtypes"] = ()
    workloads: Annotated[tuple[str, ...], OneOf(WORKLOADS)] = tuple(WORKLOADS)
    rounds: Annotated[int, AtLeast(1)] = 5
    threads: int = len(os.sched_getaffinity(0))
    folder: Path = CACHE
    install: Annotated[bool, "install the chosen sides and end"] = False


COLUMNS = {
    "workload": "{workload}",
    "side": "{side}",
    "tokens/s": "{tokens_per_second:.0f}",
    "quire / side": "{ratio:.2f}",
    "first tokens": "{first_tokens:.0%}",
}


class Side(Protocol):
    """Answers requests, like a ``SideProcess``."""

    def generate(self, requests: Requests) -> Answer:
        """Answer requests; raises ``SideFailedError``."""


class Rate(NamedTuple):
    """The result of a turn."""

    tokens_per_second: float


@program
def main(options: Options) -> Report:
    """Install sides, or compare them with each model in each type."""
    if options.install:
        for side in options.sides:
            install(side, options.folder)
        return Report([], {})
    if options.gguf:
        return report_all([*map(str, options.gguf)], ["bfloat16"], partial(compare, options), COLUMNS)
    return report_all(options.models, options.dtypes, partial(compare, options), COLUMNS)


def compare(options: Options, model: str, dtype: Dtype) -> Comparison:
    """Start all sides with a model, run the workloads, and end the sides."""
    workloads = [WORKLOADS[name] for name in options.workloads]
    if options.gguf:
        path = Path(model)
        try:
            vocab_size = read_header(path).tensors["token_embd.weight"].shape[0]
        except OSError as error:
            raise CannotRunError(str(error)) from None
    else:
        path, vocab_size = random_model(model, options.folder)
    setup = setup_for(workloads, path, dtype, options.threads)
    rows, failures = [], []
    with ExitStack() as stack:
        running: dict[str, SideProcess] = {}
        for side in options.sides:
            show_progress(f"{model}, {dtype}: {side} loads")
            try:
                running[side] = stack.enter_context(start(side, setup, options.folder))
            except SideFailedError as error:
                failures.append(f"{side} cannot run {model} in {dtype} here: {error}")
        for workload in workloads:
            if not running:
                break
            found, reasons = measure(workload, running, vocab_size, options.rounds)
            rows += [{"model": model, "dtype": dtype, "workload": workload.name, **row} for row in found]
            for side, reason in reasons.items():
                failures.append(f"{side} cannot run {workload.name} of {model} in {dtype} here: {reason}")
                del running[side]
        return Comparison(
            rows,
            failures,
            {name: side.version for name, side in running.items()},
            {name: side.arithmetic for name, side in running.items()},
        )


def measure(
    workload: Workload, sides: Mapping[str, Side], vocab_size: int, num_rounds: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for each side that ran a workload, and why the others did not."""
    answers: dict[str, list[list[int]]] = {}

    def run(side: str, index: int) -> Rate:
        requests = workload.requests(vocab_size, seed=index)
        answer = sides[side].generate(requests)
        answers[side] = answer.tokens
        rate = workload.num_tokens(requests) / answer.seconds
        show_progress(f"{workload.name}, round {index + 1}: {side} {rate:.0f} tokens/s")
        return Rate(rate)

    rounds, failures = run_rounds(sides, num_rounds, run)
    own = rounds.get("quire")
    rows = []
    for side, rates in rounds.items():
        row = {"side": side, **medians(rates)._asdict(), "ratio": None, "first_tokens": None}
        if own is not None and side != "quire":
            row["ratio"] = ratios(own, rates).tokens_per_second
            row["first_tokens"] = share_of_first_tokens(answers[side], answers["quire"])
        rows.append({**row, "rounds": [rate.tokens_per_second for rate in rates]})
    return rows, failures


def start(side: str, setup: Setup, folder: Path) -> SideProcess:
    """Start a side.

    Raises:
        SideFailedError: it is not installed, or cannot load the model.
    """
    if not is_installed(side, folder):
        raise SideFailedError("it is not installed: run with --install first")
    log = folder / "logs" / f"{side}-{Path(setup.model).name}-{setup.dtype}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return SideProcess(command(side, folder), setup, environment_variables(side, folder, setup.threads), log)


def share_of_first_tokens(answers: list[list[int]], own: list[list[int]]) -> float:
    """Return the share of a side's answers whose first token is quire's."""
    return sum(theirs[0] == mine[0] for theirs, mine in zip(answers, own, strict=True)) / len(own)


if __name__ == "__main__":
    main()
