"""What runs on a GPU later, as far as it goes without one."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from quire.benchmarks import kernels_gpu, tune_kernels
from quire.kernels.triton import configs

# Threads that spin beside those of others would slow both down many times over.
torch.set_num_threads(1)


@pytest.mark.parametrize("module", [kernels_gpu, tune_kernels])
def test_without_a_gpu_it_says_so(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        module.main([])
    assert raised.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_candidate_is_tried_for_its_own_kernel_only() -> None:
    case = "sm_90", 16, 128, 16
    prefill = configs.find_config("prefill", *case)
    for candidate in tune_kernels.candidates(prefill):
        find_config = tune_kernels.only(candidate)
        assert find_config("prefill", *case) is candidate
        assert find_config("decode", *case) == configs.find_config("decode", *case)
