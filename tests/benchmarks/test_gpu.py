"""What runs on a GPU later, as far as it goes without one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire.benchmarks import decode_steps, kernels_gpu, tune_kernels
from quire.benchmarks.harness.random_llamas import random_llama
from quire.kernels.triton import configs

# Threads that spin beside those of others would slow both down many times over.
torch.set_num_threads(1)


@pytest.mark.parametrize("module", [decode_steps, kernels_gpu, tune_kernels])
def test_without_a_gpu_it_says_so(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        module.main([])
    assert raised.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


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


def test_a_candidate_is_tried_for_its_own_kernel_only() -> None:
    case = "sm_90", 16, 128, 16
    prefill = configs.find_config("prefill", *case)
    for candidate in tune_kernels.candidates(prefill):
        find_config = tune_kernels.only(candidate)
        assert find_config("prefill", *case) is candidate
        assert find_config("decode", *case) == configs.find_config("decode", *case)
