"""Which name of a session wins, and which names count."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.services.router.tenants.session_name import (
    AGENT_HEADER,
    MAX_USER_ID_CHARS,
    SESSION_HEADERS,
    session_in_body,
    session_name,
)

CLAUDE = "x-claude-code-session-id"


@pytest.mark.parametrize("first", range(len(SESSION_HEADERS)))
def test_an_earlier_header_comes_before_later_ones_and_the_request(first: int) -> None:
    headers = [(name.title(), f"from {name}") for name in reversed(SESSION_HEADERS[first:])]
    assert session_name(headers, "named") == f"from {SESSION_HEADERS[first]}"


@pytest.mark.parametrize(
    ("headers", "named", "expected"),
    [
        ([], "", ""),
        ([("accept", "x")], "named", "named"),
        ([(CLAUDE, "s"), (AGENT_HEADER, "a")], "", "s/a"),
        ([("thread-id", "t"), (CLAUDE, "s"), (AGENT_HEADER, "a")], "", "t"),
        ([(AGENT_HEADER, "a")], "named", "named"),
        ([("x-session-id", ""), ("thread-id", "t")], "", "t"),
        ([("x-session-id", "é"), ("thread-id", "t")], "", "t"),
        ([("x-session-id", b"bytes")], "named", "named"),
        ([("x-session-id", "x" * 129)], "y" * 128, "y" * 128),
        ([("x-session-id", "a\nb")], "a\x7f", ""),
    ],
)
def test_the_first_valid_name_of_a_call(headers: Any, named: str, expected: str) -> None:
    assert session_name(headers, named) == expected


@pytest.mark.parametrize(
    ("cache_key", "metadata", "expected"),
    [
        (None, None, ""),
        ("key", {"session_id": "meta"}, "key"),
        (None, {"session_id": "meta", "user_id": '{"session_id": "user"}'}, "meta"),
        (None, {"user_id": '{"device_id": "d", "session_id": "user"}'}, "user"),
        (7, {"session_id": ["meta"]}, ""),
        (None, ["session_id"], ""),
        (None, {"user_id": "user-7"}, ""),
        (None, {"user_id": "[" * MAX_USER_ID_CHARS}, ""),
        (None, {"user_id": '["session_id"]'}, ""),
        (None, {"user_id": json.dumps({"more": "x" * MAX_USER_ID_CHARS, "session_id": "user"})}, ""),
        ("", {"session_id": "x" * 129, "user_id": '{"session_id": "user"}'}, "user"),
    ],
)
def test_the_first_valid_name_in_a_body(cache_key: Any, metadata: Any, expected: str) -> None:
    assert session_in_body(cache_key, metadata) == expected
