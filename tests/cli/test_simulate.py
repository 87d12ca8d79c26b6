"""``quire simulate``: a table, then one line of JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.app import make_app
from quire.simulator.calibration import demo_calibration, write_calibration

SMALL = ("--num-requests", "60", "--workload", "shared", "--trace-block", "16", "--rate", "4")


def simulate(*arguments: object) -> Any:
    return CliRunner().invoke(make_app(), ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})


def results(*arguments: object) -> Any:
    done = simulate(*arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_policies_are_compared_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "plots" / "policies.png"
    line = results(*SMALL, "--pulls", "never", "--policy", "load", "--policy", "precise", "--plot", picture)
    assert line["num_requests"] == 60
    assert line["results"].keys() == {"load", "precise"}
    assert line["results"]["precise"]["cached_share"] > line["results"]["load"]["cached_share"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_is_not_cut() -> None:
    done = CliRunner().invoke(make_app(), ["simulate", *SMALL, "--policy", "load"], env={"COLUMNS": "40"})
    assert "TTFT ≤ 2 s, TPOT ≤ 100 ms" in done.stdout
    assert "…" not in done.stdout


def test_requests_can_be_kept_and_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    made = results(*SMALL, "--policy", "precise", "--save-trace", trace)
    again = results("--trace", trace, "--trace-block", 16, "--policy", "precise")
    assert len(trace.read_text().splitlines()) == 60
    for name in ("num_requests", "input_tokens", "reusable_share"):
        assert again[name] == made[name]


def test_workers_of_one_machine_slow_each_other(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    write_calibration(costs, replace(demo_calibration(), prefill_share=1.0, decode_share=1.0))
    apart, together = (
        results(*SMALL, "--policy", "load", "--calibration", costs, *more)["results"]["load"]
        for more in ((), ("--one-machine",))
    )
    assert together["ttft_p50_seconds"] > 1.2 * apart["ttft_p50_seconds"]
    assert together["tpot_p50_seconds"] > 1.2 * apart["tpot_p50_seconds"]


def test_the_smallest_cluster_is_searched() -> None:
    line = results(*SMALL, "--policy", "precise", "--find", "--ttft", 5, "--tpot", 0.5)
    found = line["results"]["precise"]
    assert found["slo_share"] >= 0.9
    assert (found["num_prefill"], found["num_decode"]) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calibration", "/nowhere"), "is not a calibration"),
        (("--calibrate", "127.0.0.1:1"), "127.0.0.1:1"),
        ((*SMALL, "--find", "--ttft", "0.000001", "--max-workers", "2"), "2 workers do not suffice"),
        ((*SMALL, "--one-machine"), "no shares of the processors"),
        (("--find", "--plot", "x.png"), "leave out --find"),
        (("--plot", "x.xyz"), "--plot must end with one of"),
        (("--trace", "/nonexistent.jsonl"), "does not exist"),
        (("--rate", "inf"), "less than or equal to 1000000"),
    ],
)
def test_impossible_settings_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = simulate(*arguments, "--policy", "precise")
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
