"""Writes structured logs to stderr: one line of ``key=value`` pairs for each event.

A value with anything other than plain characters is quoted as JSON. Therefore a client's input cannot begin a
line, forge a field or reach the terminal as a control sequence.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from quire.protos import admin_pb2
from quire.rpc.errors import InvalidArgument

_ROOT = "quire"
_LEVELS: Mapping[int, int] = {
    admin_pb2.LOG_LEVEL_DEBUG: logging.DEBUG,
    admin_pb2.LOG_LEVEL_INFO: logging.INFO,
    admin_pb2.LOG_LEVEL_WARNING: logging.WARNING,
    admin_pb2.LOG_LEVEL_ERROR: logging.ERROR,
}
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+\-]+")


class EventLogger:
    """Logs events of a subject, such as ``router`` or ``grpc``, with named fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{name}")

    def debug(self, event: str, **fields: object) -> None:
        """Log an event that interests only developers."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an event that interests operators."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a problem that was handled."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a problem that an operator has to look into."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log an error with the traceback of the exception being handled."""
        self._logger.error(event, extra={"fields": fields}, exc_info=True)

    def _log(self, level: int, event: str, fields: dict[str, object]) -> None:
        self._logger.log(level, event, extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """Formats a record as one line of ``key=value`` pairs; ``constant`` fields are in every line."""

    def __init__(self, constant: dict[str, object] | None = None) -> None:
        super().__init__()
        self._constant = constant or {}

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._constant,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quote(value)}" for key, value in fields.items())


def configure_logging(level: str = "info", *, stream: TextIO | None = None, **constant: object) -> None:
    """Write all events of at least ``level`` to a stream.

    Args:
        stream: None: ``sys.stderr`` as it is at the time of each event.
        constant: fields of every line, such as the name of the process.
    """
    handler = logging.StreamHandler(stream) if stream else _StderrHandler()
    handler.setFormatter(LineFormatter(constant))
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class _StderrHandler(logging.Handler):
    """Writes to the current ``sys.stderr``; the one from the start of the process may have been closed."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def set_level(level: int) -> None:
    """Log the events of at least one of the admin API's levels.

    Raises:
        InvalidArgument: there is no such level.
    """
    if level not in _LEVELS:
        names = ", ".join(logging.getLevelName(each).lower() for each in _LEVELS.values())
        raise InvalidArgument("level", f"must be one of {names}; got {level}")
    logging.getLogger(_ROOT).setLevel(_LEVELS[level])


def _quote(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
