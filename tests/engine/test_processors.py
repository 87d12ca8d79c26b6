"""Tokens, logprobs and KV blocks have the same bits on every processor where the arithmetic is the same."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.other_processor import ENVIRONMENT, OLD

pytestmark = pytest.mark.slow

# The soft cap and rotations by layer type in one program, a model that runs by its modules, and integers.
CASES = [("gemma2", "float32", "auto"), ("gpt_neox", "bfloat16", "w8a8"), ("gemma2", "float32", "w4a8")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulated processor is an older x86")
def test_an_older_processor_computes_the_same_bits(tiny_model: Callable[[str], Path]) -> None:
    program = [sys.executable, "-m", "tests.engine.other_processor"]
    models = [f"{tiny_model(architecture)}:{dtype}:{weights}" for architecture, dtype, weights in CASES]
    # Numba stores its kernels beside those of this processor, by the processor's name and instructions.
    environment = {**os.environ, **ENVIRONMENT}
    old = subprocess.Popen([*program, OLD, *models], env=environment, stdout=subprocess.PIPE)
    with old:
        new = subprocess.run([*program, *models], stdout=subprocess.PIPE, check=True)
        old_output, _ = old.communicate(timeout=1800)
    assert old.returncode == 0
    cases = ["functions", *map(str, CASES)]
    for case, ours, its in zip(cases, json.loads(new.stdout), json.loads(old_output), strict=True):
        if "gpt_neox" in case:
            # Its functions have kernels too, but which functions a module calls is not known.
            assert ours.pop("arithmetic") != its["arithmetic"]
        for name in ours:
            assert its[name] == ours[name], f"{case}: {name} have other bits on an older processor"
