"""What runs on a GPU later, as far as it goes without one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.benchmarks import decode_steps, gpu, kernels_gpu, tune_kernels
from quire.benchmarks.harness.random_llamas import random_llama

# Threads that spin beside those of others would slow both down many times over.
torch.set_num_threads(1)


def decode_row(name: str, microseconds: float, share: float, batch: int = 64) -> dict[str, Any]:
    row = {"kind": "decode", "batch": batch, "tokens": 4096, "cached": 0, "name": name}
    return {**row, "microseconds": microseconds, "share": share}


def prefill_row(name: str, microseconds: float, cached: int = 0) -> dict[str, Any]:
    row = {"kind": "prefill", "batch": 8, "tokens": 2048, "cached": cached, "name": name}
    return {**row, "microseconds": microseconds}


def test_goals_of_the_kernels() -> None:
    rows = [
        decode_row("quire", 104.0, 0.8),
        decode_row("contiguous SDPA", 100.0, 0.83),
        decode_row("quire", 9.0, 0.1, batch=1),
        prefill_row("quire", 200.0),
        prefill_row("contiguous SDPA", 100.0),
        prefill_row("quire", 300.0, cached=2048),
        {"kind": "copy", "layers": 1, "name": "copy_blocks", "share": 0.9},
    ]
    goals = [(goal.reached, goal.is_met) for goal in gpu.kernel_goals(rows)]
    assert goals == [(0.8, False), (1.04, True), (0.5, False)]


def test_a_goal_without_its_number_is_missed() -> None:
    goals = list(gpu.kernel_goals([decode_row("quire", 100.0, 0.9), prefill_row("quire", 1.0)]))
    assert [goal.is_met for goal in goals] == [True, False, False]
    assert "MISSED" in str(goals[1])


def test_graphs_must_not_be_slower() -> None:
    times = (("eager", 1, 4.0), ("eager", 8, 4.0), ("graphs", 1, 1.0))
    rows = [{"name": name, "batch": batch, "step_ms": step_ms} for name, batch, step_ms in times]
    alone, among = gpu.step_goals(rows)
    assert (alone.reached, alone.is_met) == (0.25, True)
    assert not among.is_met, "it was not measured"


@pytest.mark.parametrize("module", [gpu, decode_steps, kernels_gpu, tune_kernels])
def test_without_a_gpu_it_says_so(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        module.main([])
    assert raised.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        gpu.main(["kernel"])
    assert raised.value.code == 2
    assert "kernel is none of tests, kernels, steps, stack" in capsys.readouterr().err


def test_a_part_returns_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": name, "batch": 1, "step_ms": 2.0} for name in ("eager", "graphs")]
    monkeypatch.setitem(gpu.PARTS, "steps", lambda _: {"rows": rows})
    result = gpu.run_part("steps")
    assert result["is_met"]
    assert result["rows"] == rows
    assert "met" in capsys.readouterr().out


def test_a_part_that_raises_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> dict[str, Any]:
        raise RuntimeError("decode-0 did not start")

    monkeypatch.setitem(gpu.PARTS, "stack", fail)
    assert gpu.run_part("stack") == {"error": "decode-0 did not start", "is_met": False}


def test_a_part_that_fails_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.PARTS, "steps", lambda _: gpu.run_module("quire.benchmarks.there_is_none"))
    result = gpu.run_part("steps")
    assert "failed" in result["error"]
    assert not result["is_met"]


def test_decode_steps_of_a_tiny_model(tmp_path: Path) -> None:
    folder = random_llama("tiny", tmp_path)
    engine = decode_steps.open_engine(folder, torch.device("cpu"), max_num_seqs=3, context=40)
    rows = list(decode_steps.measure(engine, [1, 3], 40, 1e9, lambda: lambda function: function))
    names = [(row["name"], row["batch"]) for row in rows]
    assert names == [("eager", 1), ("eager", 3), ("graphs", 1), ("graphs", 3)]
    assert all({"forward_ms", "step_ms"} <= row.keys() for row in rows)
    kv_bytes = 2 * 2 * 2 * 16 * torch.float32.itemsize * (40 + decode_steps.NUM_STEPS // 2)
    assert rows[1]["floor_ms"] - rows[0]["floor_ms"] == pytest.approx(2 * kv_bytes / 1e6, abs=2e-4)
    engine.check_conservation()
