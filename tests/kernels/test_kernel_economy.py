"""What paging costs the decode kernel, in counts, which are the same in every run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are wheels only for Linux")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run there", allow_module_level=True)

from tests.kernels.ptx import economy as economy
from tests.kernels.ptx.economy import Case


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Triton parses sources, and a collection meanwhile can trip the parser of CPython 3.11."""
    gc.disable()
    yield
    gc.enable()


def test_paging_adds_little_to_decode() -> None:
    result = economy.measure(Case("bfloat16", 128, 147, 1, num_kv_heads=1))
    assert result.paging is not None
    assert 0 < result.paging["bytes"] <= 0.01
    assert result.paging["ptx"] <= 0
    assert result.paging["loop"] <= 0.06
    # Every sector is used whole, and no access to shared memory waits for a bank.
    assert result.paged.sectors == result.paged.least_sectors
    assert result.paged.wavefronts == result.paged.least_wavefronts
    assert result.paged.bytes_by_tensor["kv read"] == 2 * 2 * 148 * 128


def test_8_bit_floats_cost_little_more_than_an_a100_issues() -> None:
    result = economy.measure(Case("e4m3", 128, 147, 1, num_kv_heads=1))
    assert result.paging is None
    assert result.shares["loop_per_byte"] < 0.31
