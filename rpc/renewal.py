"""Reads files of an operator again when they change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from quire.rpc.errors import BadFileError

T = TypeVar("T")
_log = logging.getLogger("quire.files")


class Renewal(Generic[T]):
    """Returns what files say if they have changed, or else None; any thread may call it.

    Args:
        files: the files.
        read: returns what they say. A BadFileError is logged, and the old content stays valid.
        name: begins the names of the events in the log.

    Attributes:
        first: what the files said at first.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T], name: str) -> None:
        self._files = files
        self._read = read
        self._name = name
        self._lock = threading.Lock()
        self._versions = self._present_versions()
        self.first = read()

    def __call__(self) -> T | None:
        with self._lock:
            versions = self._present_versions()
            if versions == self._versions:
                return None
            try:
                renewed = self._read()
            except BadFileError as error:
                # A file that cannot be opened now, for example because descriptors ran out, is read again.
                if not isinstance(error.__cause__, OSError):
                    self._versions = versions
                _log.error(f"{self._name}_not_reloaded", extra={"fields": {"error": error}})
                return None
            self._versions = versions
            _log.info(f"{self._name}_reloaded", extra={"fields": {"file": self._files[0]}})
            return renewed

    def _present_versions(self) -> list[tuple[int, int, int] | None]:
        return [_version(path) for path in self._files]


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # reading the file fails too, and says why
    return status.st_mtime_ns, status.st_size, status.st_ino
