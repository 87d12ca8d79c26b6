"""The harness of the benchmarks, and that each program starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pytest
from rich.console import Console

from quire.benchmarks.harness.options import AtLeast, OneOf
from quire.benchmarks.harness.program import CannotRunError, FailedError, Program, Report, program
from quire.benchmarks.harness.rounds import best_seconds, medians, turns
from quire.benchmarks.harness.tables import table

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = [
    ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__main__")
    for path in sorted(FOLDER.rglob("*.py"))
    if "@program" in path.read_text() and path.name != "program.py"
]


class Row(NamedTuple):
    name: str
    seconds: float | None


@dataclass(frozen=True)
class Options:
    parts: Annotated[tuple[str, ...], OneOf(("a", "b")), "parts to run"]
    sizes: Annotated[tuple[int, ...], AtLeast(1)] = (1, 2)
    dtype: Literal["float32", "bfloat16"] = "float32"
    folder: Path | None = None
    is_quick: bool = False


class Drawn:
    def savefig(self, path: Path, /, *, dpi: int) -> None:
        path.write_text(f"drawn with {dpi} dpi")


@program
def main(options: Options) -> Report:
    """Measure nothing, or fail in the way that the parts name."""
    if options.parts == ("a",):
        raise CannotRunError("There is no GPU.")
    if options.parts == ("b",):
        raise FailedError("The tokens differ.")
    rows = [Row("first", 0.25), Row("second", None)]
    printed = table("Times", rows, {"": "{name}", "ms": "{seconds:.2f}"})
    return Report([printed, "ceiling: none"], {"rows": rows}, {"times.png": Drawn()})


def test_there_are_programs() -> None:
    assert {"transfer", "peers", "peers.served", "paper.memory_use"} <= set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"quire.benchmarks.{name}")
    if not hasattr(module, "main"):
        module = import_module(f"quire.benchmarks.{name}.__main__")
    assert isinstance(module.main, Program)
    with pytest.raises(SystemExit) as raised:
        module.main(["--help"])
    assert not raised.value.code
    printed = capsys.readouterr().out
    assert f"python -m quire.benchmarks.{name}" in printed
    assert "--out FOLDER" in printed


def test_words_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.parse([]) == Options(())
    words = "b a b --sizes 8,4,8 --dtype bfloat16 --folder x --is-quick"
    assert main.parse(words.split()) == Options(("b", "a", "b"), (8, 4), "bfloat16", Path("x"), True)
    for wrong in (["c"], ["--dtype", "int8"], ["--sizes", "1,x"], ["--sizes", "1,0"]):
        with pytest.raises(SystemExit) as raised:
            main.parse(wrong)
        assert raised.value.code == 2
    printed = capsys.readouterr().err
    assert "c is none of a, b" in printed
    assert "0 is less than 1" in printed


def test_results_are_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sizes", "3", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "Times" in printed
    assert "ceiling: none" in printed
    line = printed.splitlines()[-1]
    result = json.loads(line)
    assert (result["sizes"], result["folder"]) == ([3], None)
    assert result["rows"] == [{"name": "first", "seconds": 0.25}, {"name": "second", "seconds": None}]
    assert (tmp_path / f"{result['benchmark']}.jsonl").read_text() == line + "\n"
    assert (tmp_path / "times.png").read_text() == "drawn with 120 dpi"


@pytest.mark.parametrize(("words", "status"), [(["a"], 2), (["b"], "The tokens differ.")])
def test_exit_status(words: list[str], status: object) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == status


def test_cells_without_a_figure_are_empty() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table("", [{"name": "x", "of": {"a": None}}], {"": "{name}", "a": "{of[a]:.1%}"}))
    assert [cell.strip() for cell in capture.get().splitlines()[-2].strip("│ ").split("│")] == ["x"]


def test_another_contender_begins_each_round() -> None:
    assert list(turns("abc", 2)) == [
        *[(-1, "c"), (-1, "a"), (-1, "b")],
        *[(0, "a"), (0, "b"), (0, "c")],
        *[(1, "b"), (1, "c"), (1, "a")],
    ]
    assert [index for index, _ in turns("a", 1, warm_up=0)] == [0]


def test_medians_of_rounds() -> None:
    assert medians([Row("a", 1.0), Row("c", 5.0), Row("b", 3.0)]) == Row("b", 3.0)


def test_best_seconds_calls_at_least_once() -> None:
    calls: list[str] = []
    assert best_seconds(lambda: calls.append("call"), seconds=0) >= 0
    assert calls == ["call"]
