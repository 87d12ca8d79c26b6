"""The screen of ``quire top``, drawn without a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from quire.cli.top.snapshot import Change
from quire.cli.top.view import Bar, Screen, sparkline
from quire.client.admin import TenantStatus
from tests.testing.snapshots import counters, snapshot, worker

WORKERS = (
    worker("decode-0", used=40, running=3),
    worker("decode-1-with-a-name-that-is-far-too-long-for-a-column", used=10, running=9, is_draining=True),
    worker("prefill-0", "prefill", used=80),
    worker("prefill-1", "prefill", is_silent=True),
)
TENANTS = (TenantStatus("acme", 5, 0, 9_000), TenantStatus("blue", 12, 7, 123_456))


def make_screen() -> Screen:
    """Return a screen with all that can happen to workers."""
    before = snapshot(
        0.0,
        *WORKERS,
        tenants=tuple(replace(each, num_tokens=0) for each in TENANTS),
        router=counters(1),
        decode_0=counters(1),
        prefill_0=counters(1),
    )
    router = counters(1, RUNNING=17, QUEUED=4, SUCCESSES=10, PROMPT_TOKENS=4000, CACHED_TOKENS=1000)
    now = snapshot(
        2.0,
        *WORKERS,
        tenants=TENANTS,
        router=router,
        decode_0=counters(1, STEP_TOKENS=246),
        prefill_0=counters(1, STEP_TOKENS=9000, PUSHES=6),
    )
    return Screen("127.0.0.1:8503", Change(now, before), Change(now, before), (0.0, 5.0, 10.0))


def draw(screen: Screen | Bar, width: int) -> list[str]:
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(screen)
    return captured.get().splitlines()


def row(lines: list[str], name: str) -> str:
    return next(line for line in lines if name in line)


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_fits_and_no_number_is_cut(width: int) -> None:
    lines = draw(make_screen(), width)
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) < 24
    text = "\n".join(lines)
    for part in ("demo at 127.0.0.1:8503", "17 running", "4 in the queue", "5 finished/s", "2,000 in/s"):
        assert part in text
    for part in ("25% of prompts cached", "3 pushes/s", "0 pulls/s", "used", "cached", "free", "▁▅█"):
        assert part in text
    assert "40%" in row(lines, "decode-0")
    assert " 123 " in row(lines, "decode-0")
    assert " 4,500 " in row(lines, "prefill-0")
    assert "draining" in row(lines, "decode-1")
    assert "silent" in row(lines, "prefill-1")
    assert "no answer" in row(lines, "prefill-1")
    assert row(lines, "blue").split()[-5:-1] == ["12", "7", "61,728", "123,456"]
    assert ("CACHED" in text) == (width == 120)


def test_a_long_name_of_a_worker_leaves_room_for_its_numbers() -> None:
    line = row(draw(make_screen(), 80), "decode-1")
    assert "…" in line
    assert line.split()[-7:-1] == ["10%", "9", "0", "0", "-", "-"]


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("ROLE", ["decode-0", "decode-1", "prefill-0", "prefill-1"]),
        ("RUN", ["decode-1", "decode-0", "prefill-0", "prefill-1"]),
        ("BLOCKS", ["prefill-0", "decode-0", "decode-1", "prefill-1"]),
        ("TOKENS/S", ["prefill-0", "decode-0", "decode-1", "prefill-1"]),
    ],
)
def test_workers_are_sorted_and_the_heading_says_by_what(order: str, names: list[str]) -> None:
    lines = draw(replace(make_screen(), order=order), 120)
    places = [next(i for i, line in enumerate(lines) if name in line) for name in names]
    assert places == sorted(places)
    assert f"{order}▼" in "\n".join(lines)


def test_tenants_are_left_out_without_keys() -> None:
    now = snapshot(1.0, worker("d"), tenants=(TenantStatus("", 1, 0, 5),), router=counters(1))
    assert "TENANT" not in "\n".join(draw(Screen("a:1", Change(now, None), Change(now, None)), 80))


def test_a_cluster_without_workers_or_metrics_is_shown() -> None:
    lines = draw(Screen("a:1", Change(snapshot(1.0), None), Change(snapshot(1.0), None)), 80)
    assert "no worker" in lines[0]
    assert "- running" in "\n".join(lines)


def test_a_problem_and_a_pause_are_shown() -> None:
    text = "\n".join(draw(replace(make_screen(), problem="no answer", is_paused=True), 80))
    assert "no answer" in text
    assert "paused" in text


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ((50, 30, 20), "▆▆▆▆▆▄▄▄▁▁"),
        ((0, 0, 100), "▁▁▁▁▁▁▁▁▁▁"),
        ((1, 0, 8191), "▆▁▁▁▁▁▁▁▁▁"),
        ((1, 8191, 0), "▆▄▄▄▄▄▄▄▄▄"),
        ((100, 0, 0), "▆▆▆▆▆▆▆▆▆▆"),
        ((0, 0, 0), "▁▁▁▁▁▁▁▁▁▁"),
    ],
)
def test_a_bar_fills_its_width_and_differs_without_colours(parts: tuple[int, int, int], line: str) -> None:
    assert draw(Bar(*parts), 10) == [line]


def test_a_sparkline_is_relative_to_its_largest_value() -> None:
    assert sparkline([0, 7, 14]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
