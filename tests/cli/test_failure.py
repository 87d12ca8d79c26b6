"""What is checked before a command works for long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from quire.cli.failure import writable


def test_the_check_of_an_output_leaves_it_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("before")
    assert (writable(new), writable(old)) == (new, old)
    assert not new.exists()
    assert old.read_text() == "before"


def test_the_check_does_not_open_a_pipe(tmp_path: Path) -> None:
    """Without a reader that would wait for ever, and its end would be the end of what a reader gets."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert writable(pipe) == pipe


@pytest.mark.parametrize("name", ["missing/file", "x" * 300])
def test_an_output_that_cannot_be_written_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(typer.BadParameter, match="cannot write"):
        writable(tmp_path / name)
