"""Writes the files that are generated from code: the dashboards' JSON and docs/metrics.md.

python -m quire.observability.build
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.boards.decode import decode_board
from quire.observability.boards.prefill import prefill_board
from quire.observability.boards.router import router_board
from quire.observability.boards.slo import slo_board
from quire.observability.boards.transfer import transfer_board
from quire.observability.boards.ttft import ttft_board
from quire.observability.dashboard import to_json
from quire.observability.metric_docs import metrics_page

ROOT = Path(__file__).resolve().parents[1]
DASHBOARDS = ROOT / "observability" / "grafana" / "dashboards"
BOARDS: Sequence[Dashboard] = (
    slo_board(),
    ttft_board(),
    prefill_board(),
    decode_board(),
    transfer_board(),
    router_board(),
)
"""All dashboards, in the order of an analysis: first the service that users get, then where time goes."""


class BuiltFile(NamedTuple):
    """A generated file and its text."""

    path: Path
    text: str


def built_files() -> Iterator[BuiltFile]:
    """Yield all files that are generated from code."""
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
