"""Links between the project's pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "[!.]*/**/*.md")
    for page in ROOT.glob(pattern)
    if not {"node_modules", "build"} & set(page.parts)
)
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    headings = _HEADING.findall(_CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading is not there."""
    broken = []
    for path, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
        target = page.parent / path if path else page
        is_there = target.exists() and (not anchor or anchor in anchors(target))
        if not is_there:
            broken.append(f"{path}#{anchor}")
    return broken


def test_there_are_pages() -> None:
    assert {"README.md", "architecture.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, `coded`\n[a](#a-heading-coded) [b](page.md) [c](no.md) [d](#no) [e](https://x/)\n"
    )
    assert broken_links(page) == ["no.md#", "#no"]
