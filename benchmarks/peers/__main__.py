"""Tokens per second of quire, vLLM, llama.cpp and transformers on this CPU, in turns.

    python -m quire.benchmarks.peers --install        # once: virtual environments of vLLM and llama.cpp
    python -m quire.benchmarks.peers
    python -m quire.benchmarks.peers --models 7m --dtypes float32 --workloads mixed,one-stream --rounds 5

Each side is a process that loads the model once, and is stopped (SIGSTOP) while it is another side's turn. A
round runs a workload on each side in turn, starting with another side each time; before the first round each
side runs the workload once. The tables have the medians of tokens per second, and how many times faster quire
is. ``prefill`` counts tokens of prompts, the others tokens of answers. transformers runs a static batch until
its longest answer ends. Answers are greedy; ``first tokens`` is the share of answers whose first token is
quire's. A side that cannot run here is named with the reason. The folder gets the environments, the models
and a log of each side. vLLM needs Debian's packages libtcmalloc-minimal4 and numactl. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import ChainMap
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from quire.benchmarks.peers.command_line import FOLDER, add_names, interrupt_on_signals, show_progress
from quire.benchmarks.peers.environments import (
    MODULES,
    command,
    environment_variables,
    install,
    is_installed,
)
from quire.benchmarks.peers.processes import SideFailedError, SideProcess
from quire.benchmarks.peers.random_llamas import SIZES, make_random_llama
from quire.benchmarks.peers.report import Measurement, table
from quire.benchmarks.peers.rounds import run_rounds
from quire.benchmarks.peers.sides.protocol import Dtype, Setup
from quire.benchmarks.peers.workloads import WORKLOADS, Workload

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


class Options(NamedTuple):
    """What is compared, and how."""

    sides: list[str]
    models: list[str]
    dtypes: list[Dtype]
    workloads: list[Workload]
    num_rounds: int
    threads: int
    folder: Path


class Comparison(NamedTuple):
    """What one model in one type gave.

    Attributes:
        measurements: one for each workload.
        versions: versions of the engines that ran, by side.
        failures: what could not run, each with the reason.
    """

    measurements: list[Measurement]
    versions: dict[str, str]
    failures: list[str]


def compare(options: Options, model: str, dtype: Dtype) -> Comparison:
    """Start all sides with a model, run the workloads, and end the sides."""
    path = make_random_llama(options.folder / "models" / model, SIZES[model])
    setup = Setup(
        str(path),
        dtype,
        options.threads,
        max_num_seqs=max(workload.num_requests for workload in options.workloads),
        max_model_len=max(workload.max_model_len for workload in options.workloads),
    )
    measurements, failures = [], []
    with ExitStack() as stack:
        running: dict[str, SideProcess] = {}
        for side in options.sides:
            show_progress(f"{model}, {dtype}: {side} loads")
            try:
                running[side] = stack.enter_context(start(side, setup, options.folder))
            except SideFailedError as error:
                failures.append(f"{side} cannot run {model} in {dtype} here: {error}")
        for workload in options.workloads if running else ():
            rounds = run_rounds(
                workload, running, SIZES[model]["vocab_size"], options.num_rounds, show_progress
            )
            for side, reason in rounds.failures.items():
                failures.append(f"{side} cannot run {workload.name} of {model} in {dtype} here: {reason}")
                del running[side]
            measurements.append(Measurement(model, dtype, workload.name, rounds.rates, rounds.first_tokens))
        return Comparison(measurements, {name: side.version for name, side in running.items()}, failures)


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the values of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_names(parser, {"sides": MODULES, "models": SIZES, "dtypes": DTYPES, "workloads": WORKLOADS})
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--install", action="store_true", help="install the chosen sides and end")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Install sides, or compare them and print the tables and the line of JSON."""
    interrupt_on_signals()
    values = parse(arguments)
    options = Options(
        values.sides,
        values.models,
        values.dtypes,
        [WORKLOADS[name] for name in values.workloads],
        values.rounds,
        values.threads,
        values.folder.expanduser().absolute(),
    )
    try:
        if values.install:
            for side in options.sides:
                install(side, options.folder)
        else:
            compare_all(options)
    except KeyboardInterrupt:
        sys.exit(130)


def compare_all(options: Options) -> None:
    """Compare the sides with each model in each type; print the tables and the line of JSON."""
    console = Console(width=160)
    comparisons = []
    for model, dtype in product(options.models, options.dtypes):
        comparison = compare(options, model, dtype)
        comparisons.append(comparison)
        console.print(table(f"{model}, {dtype}", comparison.measurements, options.sides))
        for failure in comparison.failures:
            console.print(failure, markup=False, highlight=False)
    result = {
        "bench": "peers",
        "threads": options.threads,
        "rounds": options.num_rounds,
        "versions": dict(ChainMap(*(comparison.versions for comparison in comparisons))),
        "failures": [failure for comparison in comparisons for failure in comparison.failures],
        "results": [row.as_json() for comparison in comparisons for row in comparison.measurements],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
