"""Reports the fastest contender at each prompt length and load, and the best ``--local-prefill-tokens``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.table import Table

from quire.benchmarks.harness.rounds import medians
from quire.benchmarks.harness.tables import table
from quire.cli.bench.summary import Summary

COLOCATED = "colocated"
DEFAULT = "1P1D"
NEVER_LOCAL = "1P1D, P computes"
ALWAYS_LOCAL = "1P1D, D may compute"

TIE = 0.05
"""Figures that differ by less than this share of the smaller one are equal."""


class Figures(NamedTuple):
    """The clients' figures of one round, in milliseconds. A request ends with its last token."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    request_p50: float


class Cell(NamedTuple):
    """All contenders at one prompt length and load.

    Attributes:
        prompt_tokens: tokens of each prompt.
        load: name of the load.
        rate: requests per second.
        num_requests: number of requests in a round.
        rounds: the figures of each round, by contender.
    """

    prompt_tokens: int
    load: str
    rate: float
    num_requests: int
    rounds: Mapping[str, Sequence[Figures]]

    def medians(self) -> dict[str, Figures]:
        """Return the median of each figure over the rounds, by contender."""
        return {name: medians(rounds) for name, rounds in self.rounds.items()}


def figures_of(summary: Summary) -> Figures:
    """Return the figures of a round in which every request succeeded."""
    ttft, tpot, request = summary.ttft_ms, summary.tpot_ms, summary.e2e_ms
    assert ttft is not None
    assert tpot is not None
    assert request is not None
    return Figures(ttft.p50, ttft.p99, tpot.p50, tpot.p99, request.p50)


def winner(figures: Mapping[str, float]) -> str:
    """Return the name of the smallest figure, or "tie" if the next one is hardly larger."""
    (first, best), (_, second), *_ = sorted(figures.items(), key=lambda item: item[1])
    return first if second > best * (1 + TIE) else "tie"


def winners(cell: Cell) -> list[str]:
    """Return, in the order of the figures, whether colocation or disaggregation wins."""
    medians = cell.medians()
    pairs = zip(medians[COLOCATED], medians[DEFAULT], strict=True)
    return [winner({COLOCATED: colocated, DEFAULT: disaggregated}) for colocated, disaggregated in pairs]


def switch(cells: Sequence[Cell]) -> int:
    """Return the best ``--local-prefill-tokens`` among the prompt lengths; 0 if D should compute no prompts.

    D should compute prompts of a length if, at most loads, the median request then takes no longer than when
    P computes all prompts. The same must be true of all shorter lengths.
    """
    best = 0
    for prompt_tokens, group in groupby(cells, lambda cell: cell.prompt_tokens):
        medians = [cell.medians() for cell in group]
        wins = [
            each[ALWAYS_LOCAL].request_p50 <= each[NEVER_LOCAL].request_p50 * (1 + TIE) for each in medians
        ]
        if sum(wins) * 2 <= len(wins):
            break
        best = prompt_tokens
    return best


def table_of(cells: Sequence[Cell]) -> Table:
    """Return the table of all cells: a row for each contender, and a row with the winner."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        case = {"prompt": cell.prompt_tokens, "load": f"{cell.load}, {cell.rate:.2f}/s"}
        for name, figures in cell.medians().items():
            rows.append({**case, "contender": name, "figures": [f"{each:.1f}" for each in figures]})
        rows.append({**case, "contender": "winner", "figures": winners(cell)})
    columns = {
        "prompt": "{prompt}",
        "load": "{load}",
        "contender": "{contender}",
        **{
            heading: f"{{figures[{index}]}}"
            for index, heading in enumerate(("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "request p50"))
        },
    }
    return table("Disaggregation, in ms", rows, columns)
