"""What a schedule says about its own step."""

from __future__ import annotations

import pytest

from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import ScheduledSequence
from tests.testing.tiny_engine import make_request


@pytest.mark.parametrize("moves", ["swap_out", "swap_in", "copies", "promotions"])
def test_each_kind_of_copy_moves_blocks(moves: str) -> None:
    schedule = Schedule()
    getattr(schedule, moves).append((1, 2))
    assert schedule.moves_blocks


def test_sequences_and_pins_move_no_blocks() -> None:
    request = make_request("r", [5, 6])
    schedule = Schedule(pinned=[3], promoted=[(request, 1)], sequences=[ScheduledSequence(request, 2)])
    assert not schedule.moves_blocks


def test_only_copies_to_and_from_the_swap_space_are_swaps() -> None:
    schedule = Schedule(swap_out=[(1, 2)], swap_in=[(3, 4), (5, 6)], copies=[(7, 8)], promotions=[(9, 0)])
    assert schedule.num_swapped_blocks == 3


def test_each_draft_token_has_a_row_of_logits() -> None:
    request = make_request("r", [5, 6])
    assert ScheduledSequence(request, 2).num_sampled_rows == 1
    request.draft_token_ids = [7, 8, 9]
    assert ScheduledSequence(request, 5).num_sampled_rows == 4
