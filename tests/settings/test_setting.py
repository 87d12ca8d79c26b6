"""Fields that know how users give them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from quire.settings.setting import Panel, check_settings, flag_of, is_address, setting, settings_of, variable


@dataclass(frozen=True)
class Shape:
    """A configuration with settings of each kind of limit."""

    width: int = setting(3, "--width", "How wide.", Panel.MODEL, minimum=1, maximum=9)
    height: float | None = setting(None, "--height", "How high.", Panel.MODEL, minimum=0)
    colour: Literal["red", "blue"] = setting("red", "--colour", "Which colour.", Panel.MODEL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 0}, "--width must be from 1 to 9; got 0"),
        ({"width": 10}, "--width must be from 1 to 9; got 10"),
        ({"height": float("nan")}, "--height must be at least 0; got nan"),
        ({"colour": "green"}, "--colour must be one of red, blue; got 'green'"),
    ],
)
def test_a_value_beyond_its_limits_is_refused(values: dict[str, Any], message: str) -> None:
    check_settings(Shape())
    with pytest.raises(ValueError, match=re.escape(message)):
        check_settings(Shape(**values))


def test_a_setting_is_an_ordinary_field_that_knows_its_flag() -> None:
    assert replace(Shape(), width=4) == Shape(4, None, "red")
    assert list(settings_of(Shape)) == ["width", "height", "colour"]
    assert (flag_of(Shape, "width"), variable("--max-width")) == ("--width", "QUIRE_MAX_WIDTH")


def test_a_message_calls_a_field_as_its_user_does() -> None:
    with pytest.raises(ValueError, match=r"^width must be from 1 to 9; got 0$"):
        check_settings(Shape(width=0), lambda name: name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a:1", True), ("[::1]:9000", True), ("a", False), ("a:0", False), ("a:65536", False), ("a/b:1", False)],
)
def test_an_address_is_host_and_port(text: str, expected: bool) -> None:
    assert is_address(text) == expected
