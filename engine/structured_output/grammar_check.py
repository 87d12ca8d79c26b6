"""Tries formats in another process, so that a format that crashes the compiler fails only its own request.

llguidance is native code. A format may overflow its stack or exhaust the memory, and neither of these raises
an exception. The other process runs ``grammar_process``. It is started for the first format and keeps the
tokenizer loaded.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from quire.engine.structured_output.grammar_compile import BadFormatError
from quire.engine.structured_output.grammar_process import MAX_SECONDS
from quire.sampling.output_format import OutputFormat

START_SECONDS = 60.0
"""Most seconds for a start, which loads Python, llguidance and 250,000 tokens, on a busy machine."""


class FormatCheckError(RuntimeError):
    """Formats cannot be checked, and the format is not the reason."""


class FormatChecker:
    """Runs the process that tries formats. It is thread-safe and checks one format at a time.

    Args:
        read_setup: returns the arguments of ``load_tokenizer``; called at each start of the process.
    """

    def __init__(self, read_setup: Callable[[], tuple[str, int, list[int]]]) -> None:
        self._read_setup = read_setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    @property
    def pid(self) -> int | None:
        """Id of the process; None before the first format, and after ``close``."""
        return None if self._process is None else self._process.pid

    def check(self, output_format: OutputFormat) -> int:
        """Return how many bytes a compiled format occupies.

        Raises:
            BadFormatError: the format is not valid, or exceeds a limit on time or memory.
            FormatCheckError: the process cannot be started, or has ended twice.
        """
        with self._lock:
            try:
                verdict = self._ask(output_format)
            except (OSError, EOFError, TimeoutError):
                # Start the process again. The format did not end it, since only its forks try formats.
                self.close()
                try:
                    verdict = self._ask(output_format)
                except (OSError, EOFError, TimeoutError) as error:
                    self.close()
                    raise FormatCheckError(f"the process that tries formats has ended: {error!r}") from error
        if "error" in verdict:
            raise BadFormatError(verdict["error"])
        num_bytes: int = verdict["num_bytes"]
        return num_bytes

    def close(self) -> None:
        """End the process; another check starts it again."""
        self._end()
        self._process, self._end = None, lambda: None

    def _ask(self, output_format: OutputFormat) -> dict[str, Any]:
        if self._process is None:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "quire.engine.structured_output.grammar_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # When native code crashes, it writes to stderr. This output does not belong in the log.
                stderr=subprocess.DEVNULL,
                # Ctrl-C must reach only this process, not the one that tries formats.
                process_group=0,
            )
            self._end = weakref.finalize(self, _stop, process)
            _exchange(process, self._read_setup(), START_SECONDS)
        return _exchange(self._process, astuple(output_format), 2 * MAX_SECONDS)


def _exchange(process: subprocess.Popen[bytes], value: object, timeout: float) -> dict[str, Any]:
    """Send a value as a line of JSON; return the value of the reply line.

    Raises:
        EOFError: the process has ended.
        TimeoutError: the process does not answer within ``timeout`` seconds.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()
    deadline, line = time.monotonic() + timeout, b""
    while not line.endswith(b"\n"):
        # read1 blocks, so select bounds the wait in case the process hangs.
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"no answer within {timeout:g} s")
        if not (part := process.stdout.read1()):  # type: ignore[attr-defined]
            raise EOFError(f"exit code {process.wait()}")
        line += part
    return dict(json.loads(line))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
