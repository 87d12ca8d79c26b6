"""A container's quota of processor time, in files as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.services.server.process import num_processors


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 8),
    ],
)
def test_the_quota_of_cgroups_version_2(tmp_path: Path, text: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert num_processors(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", 8), ("300000\n", 3), ("20000\n", 1)])
def test_the_quota_of_cgroups_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_processors(tmp_path) == expected


def test_without_cgroups_the_processors_count(tmp_path: Path) -> None:
    assert num_processors(tmp_path) == 8
