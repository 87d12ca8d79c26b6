"""What the measurement of disaggregation concludes from its figures."""

from __future__ import annotations

import pytest
from rich.console import Console

from quire.benchmarks.disaggregation.__main__ import MAX_MODEL_LEN, main
from quire.benchmarks.disaggregation.report import (
    ALWAYS_LOCAL,
    COLOCATED,
    DEFAULT,
    NEVER_LOCAL,
    Cell,
    Figures,
    switch,
    table_of,
    winner,
    winners,
)


def cell(prompt_tokens: int, always_local: float, never_local: float = 100.0) -> Cell:
    """Return a cell in which requests take these times, in milliseconds."""
    return Cell(
        prompt_tokens,
        "light",
        2.0,
        8,
        {
            COLOCATED: [Figures(10.0, 20.0, 3.0, 4.0, 100.0)],
            DEFAULT: [Figures(20.0, 20.5, 2.0, 1.0, 90.0)],
            NEVER_LOCAL: [Figures(20.0, 20.0, 2.0, 2.0, never_local)],
            ALWAYS_LOCAL: [Figures(20.0, 20.0, 2.0, 2.0, always_local)],
        },
    )


def test_a_winner_is_ahead_by_five_percent() -> None:
    assert winner({"a": 100.0, "b": 106.0}) == "a"
    assert winner({"a": 104.0, "b": 100.0}) == "tie"
    assert winners(cell(128, 100.0)) == [COLOCATED, "tie", DEFAULT, DEFAULT, DEFAULT]


@pytest.mark.parametrize(
    ("request_times", "expected"),
    [([90.0, 104.0, 150.0], 512), ([150.0, 90.0, 90.0], 0), ([90.0, 90.0, 90.0], 2048)],
)
def test_the_switch_is_the_last_length_that_d_computes_as_fast(
    request_times: list[float], expected: int
) -> None:
    cells = [cell(length, each) for length, each in zip((128, 512, 2048), request_times, strict=True)]
    assert switch(cells) == expected


def test_most_loads_decide_on_the_switch() -> None:
    assert switch([cell(128, 90.0), cell(128, 90.0), cell(128, 150.0)]) == 128
    assert switch([cell(128, 90.0), cell(128, 150.0)]) == 0


def test_medians_over_rounds() -> None:
    rounds = {COLOCATED: [Figures(*[value] * 5) for value in (1.0, 5.0, 3.0)]}
    measured = Cell(128, "light", 2.0, 8, rounds)
    assert measured.medians() == {COLOCATED: Figures(3.0, 3.0, 3.0, 3.0, 3.0)}


def test_table_names_the_winners() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table_of([cell(128, 100.0)]))
    cells = [cell.strip() for cell in capture.get().splitlines()[-2].strip("│ ").split("│")]
    assert cells == ["128", "light, 2.00/s", "winner", COLOCATED, "tie", DEFAULT, DEFAULT, DEFAULT]


def test_options() -> None:
    assert main.parse(["--prompt-tokens", "512,128,512"]).prompt_tokens == (512, 128)
    with pytest.raises(SystemExit):
        main.parse(["--prompt-tokens", str(MAX_MODEL_LEN)])
    with pytest.raises(SystemExit):
        main.parse(["--prompt-tokens", "0"])
