"""The levels of the admin API, which a logger has to know."""

from __future__ import annotations

import logging

import pytest

from quire.protos import admin_pb2
from quire.rpc.errors import InvalidArgument
from quire.services.server.log_level import level_name


def test_every_level_of_the_api_is_one_of_the_logger() -> None:
    levels = set(admin_pb2.LogLevel.values()) - {admin_pb2.LOG_LEVEL_UNSPECIFIED}
    names = [level_name(level) for level in sorted(levels)]
    assert names == ["debug", "info", "warning", "error"]
    assert all(name.upper() in logging.getLevelNamesMapping() for name in names)


@pytest.mark.parametrize("level", [admin_pb2.LOG_LEVEL_UNSPECIFIED, 99])
def test_any_other_level_is_refused(level: int) -> None:
    with pytest.raises(InvalidArgument, match="must be one of debug, info, warning, error"):
        level_name(level)
