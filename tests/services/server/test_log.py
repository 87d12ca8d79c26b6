"""The log: one line for each event, whatever its values are."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import admin_pb2
from quire.rpc.errors import InvalidArgument
from quire.services.server.log import EventLogger, LineFormatter, configure_logging, set_level

FIELD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[A-Za-z0-9_.:/@+\-]+)')


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """Leave the root logger of the project as it was."""
    logger = logging.getLogger("quire")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def line(**fields: object) -> str:
    record = logging.LogRecord("quire.test", logging.INFO, "", 0, "done", (), None)
    record.fields = fields
    return LineFormatter({"role": "router"}).format(record)


def parsed(text: str) -> dict[str, str]:
    """Return the fields of a line, which is nothing but fields."""
    assert FIELD.sub("", text).strip(" ") == ""
    return {key: json.loads(value) if value[0] == '"' else value for key, value in FIELD.findall(text)}


@given(value=st.text(), other=st.text(st.sampled_from('a"\\= \n\r\t\x00\x1b\x7f\x85\u2028')))
def test_a_line_has_the_values_that_it_was_given_and_no_others(value: str, other: str) -> None:
    text = line(value=value, other=other)
    assert text.isascii()
    assert text.isprintable(), "no control character reaches a terminal"
    fields = parsed(text)
    assert list(fields) == ["time", "level", "role", "event", "value", "other"]
    assert (fields["event"], fields["value"], fields["other"]) == ("done", value, other)


def test_numbers_are_short_and_every_line_has_a_time() -> None:
    fields = parsed(line(seconds=1 / 3, count=7, none=None))
    assert (fields["seconds"], fields["count"], fields["none"]) == ("0.333333", "7", "None")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields["time"])


def test_events_below_the_level_are_omitted() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream, role="worker")
    log = EventLogger("test")
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)(f"at_{level}")
    set_level(admin_pb2.LOG_LEVEL_DEBUG)
    log.debug("now")
    events = [parsed(each)["event"] for each in stream.getvalue().splitlines()]
    assert events == ["at_warning", "at_error", "now"]


@pytest.mark.parametrize("name", sorted(set(admin_pb2.LogLevel.keys()) - {"LOG_LEVEL_UNSPECIFIED"}))
def test_every_level_of_the_admin_api_is_one_of_the_logger(name: str) -> None:
    set_level(admin_pb2.LogLevel.Value(name))
    assert name == f"LOG_LEVEL_{logging.getLevelName(logging.getLogger('quire').level)}"


@pytest.mark.parametrize("level", [admin_pb2.LOG_LEVEL_UNSPECIFIED, 99])
def test_any_other_level_is_refused(level: int) -> None:
    with pytest.raises(InvalidArgument, match="must be one of debug, info, warning, error"):
        set_level(level)


def test_a_traceback_is_one_value_of_the_line() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    try:
        raise ValueError("a\nb")
    except ValueError:
        EventLogger("test").exception("failed", request_id="r")
    [text] = stream.getvalue().splitlines()
    fields = parsed(text)
    assert (fields["event"], fields["request_id"], fields["level"]) == ("failed", "r", "error")
    assert fields["exception"].endswith("ValueError: a\nb")
