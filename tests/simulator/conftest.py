"""Round figures instead of measured ones, so that expectations can be counted out."""

from __future__ import annotations

import pytest

from quire.simulator.calibration import Calibration


@pytest.fixture
def calibration() -> Calibration:
    """Prompts take 1 ms a token, steps 10 ms and 1 ms a sequence more; a block of 16 tokens has 1 MB."""
    return Calibration(
        block_tokens=16,
        block_bytes=1e6,
        num_blocks=1000,
        max_num_seqs=4,
        prefill=((100, 0.1), (1000, 1.0)),
        decode_step=((1, 0.01), (4, 0.013)),
        overhead_seconds=0.005,
        handoff_seconds=0.002,
        pull_bytes_per_second=1e9,
        pull_round_trip_seconds=0.001,
    )
