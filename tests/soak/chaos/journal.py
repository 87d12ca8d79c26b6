"""Writes what happens in a chaos run, with its time, as lines of JSON."""

from __future__ import annotations

import json
import time
from typing import TextIO


class Journal:
    """Records events; times are seconds since the journal was made.

    Args:
        file: where the lines go; None: nowhere.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._begin = time.monotonic()
        self.defects: list[str] = []

    @property
    def seconds(self) -> float:
        """Time since the journal was made."""
        return time.monotonic() - self._begin

    def record(self, event: str, **fields: object) -> None:
        """Write an event."""
        if self._file is not None:
            line = {"seconds": round(self.seconds, 3), "event": event, **fields}
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()

    def record_defect(self, description: str) -> None:
        """Write something that must not happen, and keep it for the report."""
        self.defects.append(f"{self.seconds:.1f} s: {description}")
        self.record("defect", description=description)
