"""Writes the dashboards' JSON from the files in ``boards``, and docs/metrics.md from the code.

python -m quire.observability.build
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.observability.dashboard import read_board, to_json
from quire.observability.metric_docs import metrics_page

ROOT = Path(__file__).resolve().parents[1]
DASHBOARDS = ROOT / "observability" / "grafana" / "dashboards"
BOARDS = [read_board(name) for name in ("slo", "ttft", "prefill", "decode", "transfer", "router")]
"""All dashboards, in the order of an analysis: first the service that users get, then where time goes."""


class BuiltFile(NamedTuple):
    """A generated file and its text."""

    path: Path
    text: str


def built_files() -> Iterator[BuiltFile]:
    """Yield all generated files."""
    for board in BOARDS:
        yield BuiltFile(DASHBOARDS / f"{board.uid}.json", to_json(board))
    yield BuiltFile(ROOT / "docs" / "metrics.md", metrics_page())


def main() -> None:
    """Write the files."""
    for file in built_files():
        file.path.write_text(file.text, encoding="utf-8")
        print(f"wrote {file.path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
