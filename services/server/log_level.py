"""Translates the log levels of the admin API to the names that loggers use."""

from __future__ import annotations

from collections.abc import Mapping

from quire.protos import admin_pb2
from quire.rpc.errors import InvalidArgument

_NAMES: Mapping[int, str] = {
    admin_pb2.LOG_LEVEL_DEBUG: "debug",
    admin_pb2.LOG_LEVEL_INFO: "info",
    admin_pb2.LOG_LEVEL_WARNING: "warning",
    admin_pb2.LOG_LEVEL_ERROR: "error",
}


def level_name(level: int) -> str:
    """Return the name that loggers use for a level of the admin API.

    Raises:
        InvalidArgument: there is no such level.
    """
    if level not in _NAMES:
        raise InvalidArgument("level", f"must be one of {', '.join(_NAMES.values())}; got {level}")
    return _NAMES[level]
