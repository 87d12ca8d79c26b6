"""Commands that tests run to their ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def run_command(
    *command: str | Path,
    status: int = 0,
    timeout: float = 60.0,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command with changed environment variables, and expect its status; return what it wrote."""
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == status, done.stderr
    return done
