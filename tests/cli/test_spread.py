"""A verb's parameters that are dataclasses become their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from quire.cli.spread import spread


@dataclass(frozen=True)
class Size:
    """Two options."""

    width: Annotated[int, typer.Option("--width", help="How wide.")] = 3
    height: Annotated[int | None, typer.Option("--height")] = None


def test_fields_are_options_and_are_read_back_into_the_dataclass() -> None:
    app, drawn = typer.Typer(), []

    @app.command()
    @spread
    def draw(*, name: Annotated[str, typer.Argument()], size: Size, twice: bool = False) -> None:
        """Draw."""
        drawn.append((name, size, twice))

    runner = CliRunner()
    assert runner.invoke(app, ["a"]).exit_code == 0
    assert runner.invoke(app, ["b", "--height", "7", "--twice"]).exit_code == 0
    assert drawn == [("a", Size(3, None), False), ("b", Size(3, 7), True)]
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert all(text in shown for text in ("Draw.", "--width", "How wide.", "--twice"))
    assert "--size" not in shown


def test_two_options_of_one_name_are_refused() -> None:
    def draw(*, width: int = 1, size: Size) -> None: ...

    with pytest.raises(TypeError, match="draw: two of its options have the same name"):
        spread(draw)
