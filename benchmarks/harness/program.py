"""Runs a benchmark as a command: options in, tables and one line of JSON out.

@dataclass(frozen=True)
class Options:
    rounds: Annotated[int, AtLeast(1), "rounds; medians count"] = 3


@program
def main(options: Options) -> Report: ...


if __name__ == "__main__":
    main()
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

from rich.console import Console
from rich.table import Table

from quire.benchmarks.harness.options import add_options

T = TypeVar("T")


class CannotRunError(Exception):
    """The benchmark cannot run on this machine; the message is a sentence that says why."""


class FailedError(Exception):
    """The measured code failed or gave wrong tokens; the message says how."""


class Picture(Protocol):
    """A figure of matplotlib."""

    def savefig(self, path: Path, /, *, dpi: int) -> None:
        """Write the picture to a file."""


@dataclass(frozen=True)
class Report:
    """The results of a program.

    Attributes:
        printed: the tables and lines that are printed.
        results: the content of the line of JSON, in addition to the options.
        pictures: pictures by the names of their files.
        is_failed: whether the exit status is 1.
    """

    printed: Sequence[Table | str]
    results: Mapping[str, Any]
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    is_failed: bool = False


class Program(Generic[T]):
    """A command. It is called with its arguments, by default with those of the process.

    It has an option for each field of the options, and ``--out FOLDER``, which writes the line of JSON and
    the pictures to files. The exit status is 1 if something failed, and 2 if this machine cannot run it.
    """

    def __init__(self, measure: Callable[[T], Report]) -> None:
        module = measure.__globals__
        self._module = module["__spec__"].name.removesuffix(".__main__")
        self._about = module["__doc__"]
        self._options: type[T] = get_type_hints(measure)["options"]
        self._measure = measure

    def parse(self, words: Sequence[str] | None = None) -> T:
        """Return the options; exit with status 2 if they are wrong."""
        return self._parse(words)[0]

    def __call__(self, words: Sequence[str] | None = None) -> None:
        """Measure, print the tables and the line of JSON, and exit if something failed."""
        options, out = self._parse(words)
        # SIGINT and SIGTERM must both end the processes that a benchmark started, and background scripts
        # ignore SIGINT.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            report = self._measure(options)
        except CannotRunError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        except FailedError as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            sys.exit(130)
        self._show(options, report, out)
        if report.is_failed:
            sys.exit(1)

    def _parse(self, words: Sequence[str] | None) -> tuple[T, Path | None]:
        raw = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(
            f"python -m {self._module}", description=self._about, formatter_class=raw
        )
        add_options(parser, self._options)
        parser.add_argument(
            "--out", type=Path, metavar="FOLDER", help="where to write the results and pictures"
        )
        values = vars(parser.parse_args(words))
        out: Path | None = values.pop("out")
        # argparse returns positional words as a list.
        values = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
        try:
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
            return self._options(**values), out
        except (OSError, ValueError) as error:
            parser.error(str(error))

    def _show(self, options: T, report: Report, out: Path | None) -> None:
        console = Console(width=None if sys.stdout.isatty() else 160)
        for each in report.printed:
            console.print(each, markup=False, highlight=False)
        name = self._module.removeprefix("quire.benchmarks.")
        line = json.dumps({"benchmark": name, **_plain(options), **_plain(report.results)})
        if out is not None:
            (out / f"{name}.jsonl").write_text(line + "\n")
            for file, picture in report.pictures.items():
                picture.savefig(out / file, dpi=120)
        print(line, flush=True)


def program(measure: Callable[[T], Report]) -> Program[T]:
    """Return the command that runs a function whose only parameter, ``options``, is a dataclass."""
    return Program(measure)


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types: named tuples and dataclasses become objects, and paths become text."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
