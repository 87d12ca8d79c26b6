"""One thing that was found out about the machine."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """What was found out about a subject.

    Attributes:
        level: "warning" if the command serves, but slower or less safely; "problem" if it cannot serve.
        remedy: one line, empty if nothing is to be done.
    """

    level: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    remedy: str = ""
