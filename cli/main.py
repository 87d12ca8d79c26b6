"""The entry point of the command ``quire``; ``app.py`` has its verbs.

Each process that ``quire serve`` starts imports this module again, so it imports little before ``main`` runs.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys

MIN_HELP_COLUMNS = 100
"""Fewest columns of help texts; with fewer, names of options and variables would be truncated."""


def main() -> None:
    """Run the command."""
    # Without this, gRPC prints lines to stderr that repeat the errors of the commands.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Python has no object for a stream that the caller has closed.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on stderr: a character that the terminal's encoding lacks must not end an answer.
        sys.stdout.reconfigure(errors="backslashreplace")
    if shutil.get_terminal_size().columns < MIN_HELP_COLUMNS:
        os.environ.setdefault("TERMINAL_WIDTH", str(MIN_HELP_COLUMNS))
    try:
        from quire.cli.app import make_app

        make_app()()
    except KeyboardInterrupt:  # before the command runs, which has its own answer
        from quire.cli.failure import INTERRUPTED

        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What stdout still has in its buffer would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(f"error: cannot write: {error.strerror}") from None
