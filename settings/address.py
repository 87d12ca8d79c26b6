"""Recognises addresses of the form host:port."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"[^/\s]+:(\d{1,5})")


def is_address(text: str) -> bool:
    """Return whether a text is host:port."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 1 << 16
