"""Whether a preempted group is copied or recomputed follows from what both have cost."""

from __future__ import annotations

from quire.engine.scheduling.swapping import SwapCost

BLOCK_BYTES = 1 << 20
"""The first copies are assumed to take 0.5 ms for a block of this size."""


def test_blocks_are_recomputed_until_a_forward_pass_has_been_measured() -> None:
    cost = SwapCost(BLOCK_BYTES)
    assert not cost.prefers_swap(num_tokens=1_000_000, num_blocks=1)
    cost.record_forward(num_tokens=100, seconds=0.1)
    assert cost.prefers_swap(num_tokens=16, num_blocks=1)


def test_a_block_is_copied_out_and_back() -> None:
    cost = SwapCost(BLOCK_BYTES)
    cost.record_forward(num_tokens=100, seconds=0.1)  # 1 ms for a token
    for _ in range(50):
        cost.record_swap(num_blocks=10, seconds=0.08)  # 8 ms for a block
    assert not cost.prefers_swap(num_tokens=15, num_blocks=1)
    assert cost.prefers_swap(num_tokens=17, num_blocks=1)


def test_small_steps_and_empty_swaps_are_not_measured() -> None:
    cost = SwapCost(BLOCK_BYTES)
    cost.record_forward(num_tokens=100, seconds=0.1)
    for _ in range(50):
        cost.record_forward(num_tokens=31, seconds=0.0)  # decode steps say little about prompts
        cost.record_swap(num_blocks=0, seconds=10.0)
    assert cost.prefers_swap(num_tokens=16, num_blocks=1)


def test_the_mean_follows_the_latest_measurements() -> None:
    cost = SwapCost(BLOCK_BYTES)
    cost.record_forward(num_tokens=100, seconds=0.1)
    cost.record_forward(num_tokens=100, seconds=0.0)
    assert cost.prefers_swap(num_tokens=2, num_blocks=1)  # the mean is 0.8 ms a token
    for _ in range(50):
        cost.record_forward(num_tokens=100, seconds=0.0)
    assert not cost.prefers_swap(num_tokens=1000, num_blocks=1)
