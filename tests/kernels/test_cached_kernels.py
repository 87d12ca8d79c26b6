"""A kernel from Numba's cache on disk computes what the kernel computed that was just compiled.

The two are different machine code: functions that are not inlined are optimized again with the kernel that
is stored, while the process that compiles them calls the first versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from quire.kernels.cpu.linear import linear, pack
from quire.kernels.cpu.quantized_weight import quantize

torch.manual_seed(0)
weight = torch.randn(96, 64)
packed = pack(weight) if sys.argv[1] == "float32" else quantize(weight, sys.argv[1])
expected_weight = packed.unpack()
for num_rows in range(1, 15):
    inputs = torch.randn(num_rows, 64)
    torch.testing.assert_close(linear(inputs, packed, None), inputs @ expected_weight.T)
"""


@pytest.mark.parametrize("weight_dtype", ["float32", "int8", "int4"])
def test_linear_layers_from_the_cache_are_right(tmp_path: Path, weight_dtype: str) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROGRAM, weight_dtype], env=environment, check=True)
        assert list(tmp_path.rglob("linear*.nbc")), "the kernel was not stored"
