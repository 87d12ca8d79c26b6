"""What the commands that start other processes share: options, progress and signals."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

FOLDER = Path("~/.cache/quire/peers")
"""Default folder of environments, models and logs."""


def interrupt_on_signals() -> None:
    """Raise ``KeyboardInterrupt`` on SIGINT and SIGTERM, so that all started processes are ended.

    A script that runs in the background has SIGINT ignored by default.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def show_progress(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def add_names(parser: argparse.ArgumentParser, options: Mapping[str, Iterable[str]]) -> None:
    """Add options that take some of their names, separated by commas, and all of them by default."""
    for option, known in options.items():
        names = list(known)
        parser.add_argument(f"--{option}", type=names_out_of(names), default=names, metavar=",".join(names))


def names_out_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the reader of an option's value: names, separated by commas."""
    choices = list(known)

    def read(value: str) -> list[str]:
        names = value.split(",")
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(choices)}")
        return list(dict.fromkeys(names))

    return read
