"""Writes the results of the survey of architectures into the page about models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

_HEADING, _NEXT_HEADING = "## Which architectures run\n", "## Which architectures ranks divide\n"
_INTRODUCTION = (
    "`python -m quire.benchmarks.model_survey --page docs/models.md` writes this section. It creates a tiny "
    "random model of every causal architecture that transformers knows, with every kind of layer that its "
    "published models have, and compares its greedy tokens with those of `generate`. (`generate` gives "
    "RoBERTa's kind other positions than the model counts itself, so there the tokens are those of the "
    "model, called without a cache.) These are the results with transformers "
)
_WIDTH = 120


class Status(StrEnum):
    """What the survey found out about an architecture."""

    SERVED = "served"
    REFUSED = "refused"
    UNTRIED = "not tried"
    FAILED = "FAILED"


class Result(NamedTuple):
    """The result for an architecture; a served one needs no reason."""

    status: Status
    reason: str = ""


def write_page(path: Path, results: Mapping[str, Result], version: str) -> None:
    """Replace the section about architectures of a page by results with a version of transformers."""
    page = path.read_text("utf-8")
    start, end = page.index(_HEADING), page.index(_NEXT_HEADING)
    path.write_text(page[:start] + section(results, version) + page[end:], "utf-8")


def section(results: Mapping[str, Result], version: str) -> str:
    """Return the section about architectures in Markdown."""
    parts = [_HEADING, fill(f"{_INTRODUCTION}{version}:", _WIDTH) + "\n"]
    titles = {Status.SERVED: "Served, with the same tokens"}
    for status in Status:
        found = {name: each.reason for name, each in results.items() if each.status is status}
        if found:
            parts.append(f"### {titles.get(status, status.capitalize())} ({len(found)})\n")
            parts.append(_by_reason(found))
    return "\n".join(parts) + "\n"


def _by_reason(reasons: Mapping[str, str]) -> str:
    """Return a list of reasons with their architectures, the most frequent first."""
    names: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        names.setdefault(reason, []).append(name)
    if list(names) == [""]:
        return _filled(_quoted(names[""])) + "\n"
    lines = sorted(names.items(), key=lambda each: -len(each[1]))
    return "".join(f"{_filled(f'* {reason}: {_quoted(each)}', '  ')}\n" for reason, each in lines)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _filled(text: str, indent: str = "") -> str:
    return fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
