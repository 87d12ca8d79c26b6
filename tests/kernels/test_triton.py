"""Runs the tests of the Triton kernels, interpreted and on a GPU.

Each in a process of its own: Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are wheels only for Linux")

TESTS = Path(__file__).parent


@pytest.mark.parametrize("module", ["triton_kernels", "triton_layers"])
@pytest.mark.parametrize(
    "interpret",
    [
        pytest.param("1", id="interpreted"),
        pytest.param(
            "0",
            id="cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ),
    ],
)
def test_kernels_equal_the_reference(interpret: str, module: str) -> None:
    # NumPy, which stands in for the hardware, warns of exp2 that becomes infinite, as it should.
    options = ["-q", "-W", "ignore:overflow encountered:RuntimeWarning", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(TESTS / f"{module}.py")],
        cwd=TESTS.parents[1],
        # On a GPU the oracle's products refuse to run without it, in the mode that poisons fresh memory.
        # Interpreted programs make small products, at which a second thread of torch only spins.
        env={
            **os.environ,
            "TRITON_INTERPRET": interpret,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
