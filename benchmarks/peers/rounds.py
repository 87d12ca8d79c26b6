"""Runs rounds of several sides, some of which may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quire.benchmarks.harness.program import CannotRunError, Report
from quire.benchmarks.harness.rounds import medians, turns
from quire.benchmarks.harness.tables import table
from quire.benchmarks.peers.processes import SideFailedError
from quire.benchmarks.peers.sides.protocol import Dtype

INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
)
"""Names that Linux gives to sets of instructions."""

Figures = TypeVar("Figures", bound=tuple[Any, ...])
Found = TypeVar("Found")


def run_rounds(
    sides: Iterable[str], num_rounds: int, run: Callable[[str, int], Found]
) -> tuple[dict[str, list[Found]], dict[str, str]]:
    """Let sides take turns, first in a round that warms up.

    Args:
        sides: names of the sides.
        num_rounds: number of rounds that count.
        run: runs a turn of a side in a round and returns its result; may raise ``SideFailedError``.

    Returns:
        The results of each side in each round; for sides that failed, the reasons instead.
    """
    rounds: dict[str, list[Found]] = {side: [] for side in sides}
    failures: dict[str, str] = {}
    for index, side in turns(list(rounds), num_rounds):
        if side in failures:
            continue
        try:
            found = run(side, index)
        except SideFailedError as error:
            failures[side] = str(error)
            del rounds[side]
            continue
        if index >= 0:
            rounds[side].append(found)
    return rounds, failures


def ratios(own: Sequence[Figures], other: Sequence[Figures]) -> Figures:
    """Return the median over the rounds of each figure divided by the other side's; 0 if that is 0.

    Both figures of a ratio are from the same round, so a temporary disturbance of the machine changes both.
    """
    rounds = []
    for mine, theirs in zip(own, other, strict=True):
        divided: list[Any] = [a / b if b else 0.0 for a, b in zip(mine, theirs, strict=True)]
        rounds.append(type(mine)(*divided))
    return medians(rounds)


class Comparison(NamedTuple):
    """The results of one model with one type of weights.

    Attributes:
        rows: one for each workload and side.
        failures: the sides that could not run, each with the reason.
        versions: versions of the engines, by side.
        arithmetic: what the sides say of their arithmetic, by side.
    """

    rows: list[dict[str, Any]]
    failures: list[str]
    versions: dict[str, str]
    arithmetic: dict[str, str]


def report_all(
    models: Sequence[str],
    dtypes: Sequence[Dtype],
    compare: Callable[[str, Dtype], Comparison],
    columns: Mapping[str, str],
) -> Report:
    """Compare the sides with each model in each type, and return the report.

    Raises:
        CannotRunError: no side can run here.
    """

    def compared(model: str, dtype: Dtype) -> Comparison:
        try:
            return compare(model, dtype)
        except CannotRunError as error:  # the results of the others must not be lost
            return Comparison([], [str(error)], {}, {})

    found = {(model, dtype): compared(model, dtype) for model, dtype in product(models, dtypes)}
    rows = [row for each in found.values() for row in each.rows]
    failures = [failure for each in found.values() for failure in each.failures]
    if not rows:
        raise CannotRunError("; ".join(failures))
    tables = [table(", ".join(case), comparison.rows, columns) for case, comparison in found.items()]
    versions = {side: version for each in found.values() for side, version in each.versions.items()}
    arithmetic = {
        f"{model}, {dtype}, {side}": text
        for (model, dtype), each in found.items()
        for side, text in each.arithmetic.items()
    }
    processor = processor_name()
    lines = [f"Processor: {processor}", *(f"{case}: {text}" for case, text in arithmetic.items())]
    facts = {"processor": processor, "versions": versions, "arithmetic": arithmetic, "failures": failures}
    return Report([*tables, *lines, *failures], {**facts, "rows": rows})


def processor_name() -> str:
    """Return the name of this machine's processor and those of its instructions that matter for products."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    )
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = [flag for flag in INSTRUCTIONS if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'unknown')} ({', '.join(flags) or 'none of the known instructions'})"
