"""What tests of Triton's kernels ask for by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Triton parses sources, and a collection meanwhile can trip the parser of CPython 3.11."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Let torch fill fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
