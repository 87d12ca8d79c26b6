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


def test_nothing_is_copied_into_blocks_that_are_given_back() -> None:
    """A group that is preempted in the step that gave it blocks has nothing there to be swapped out."""
    schedule = Schedule(swap_out=[(3, 0)], swap_in=[(1, 3), (2, 4)], copies=[(9, 5), (9, 6)])
    assert not schedule.drop_copies_into([1, 2, 9])
    assert schedule.drop_copies_into([3, 5])
    assert (schedule.swap_out, schedule.swap_in, schedule.copies) == ([(3, 0)], [(2, 4)], [(9, 6)])


def test_nothing_is_promoted_into_blocks_that_are_given_back() -> None:
    schedule = Schedule(promotions=[(1, 3), (2, 4), (5, 6)])
    assert schedule.drop_promotions_into([1, 2]) == []
    assert schedule.drop_promotions_into([3, 4]) == [1, 2]
    assert schedule.promotions == [(5, 6)]
