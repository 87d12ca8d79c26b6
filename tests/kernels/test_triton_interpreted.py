"""Runs the interpreted Triton tests in a process of their own: Triton reads that wish when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there are wheels for Linux alone")

TESTS = Path(__file__).with_name("triton_interpreted.py")


def test_interpreted_kernels_equal_the_reference() -> None:
    # NumPy, which stands in for the hardware, warns of exp2 that becomes infinite, as it should.
    options = ["-q", "-W", "ignore:overflow encountered:RuntimeWarning", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(TESTS)],
        cwd=TESTS.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
