"""The credit window, under any order of grants and blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kvtransfer.credit import CreditWindow
from quire.kvtransfer.errors import ProtocolError


@given(first=st.integers(0, 40), count=st.integers(0, 40), size=st.integers(0, 50), data=st.data())
def test_a_push_never_stalls_and_never_exceeds_its_window(
    first: int, count: int, size: int, data: st.DataObject
) -> None:
    window = CreditWindow(first, first + count, size)
    granted = taken = 0
    while window.num_missing:
        granted += window.grant()
        assert taken < granted <= count, "stalled, or granted blocks that do not exist"
        assert granted - taken <= max(1, size)
        for _ in range(data.draw(st.integers(1, granted - taken))):
            assert window.take(first + taken)
            taken += 1
    assert taken == count
    assert window.grant() == 0


@pytest.mark.parametrize("index", [0, 1, 4, 5, 9])
def test_gaps_overruns_and_blocks_of_others_are_refused(index: int) -> None:
    window = CreditWindow(first_block=2, num_blocks=8, size=2)
    window.grant()
    window.take(2)
    with pytest.raises(ProtocolError, match=f"block {index} arrived, not block 3,"):
        window.take(index)
    assert window.num_missing == 5


def test_the_block_that_is_due_needs_credit() -> None:
    window = CreditWindow(first_block=0, num_blocks=8, size=2)
    window.grant()
    assert window.take(0)
    assert window.take(1)
    with pytest.raises(ProtocolError, match="with credit up to block 2"):
        window.take(2)


def test_a_repeated_block_takes_no_credit() -> None:
    window = CreditWindow(first_block=2, num_blocks=8, size=4)
    window.grant()
    assert [window.take(index) for index in (2, 3, 2, 3, 4)] == [True, True, False, False, True]


def test_grants_wait_until_half_of_the_window_is_used() -> None:
    window = CreditWindow(first_block=0, num_blocks=100, size=8)
    assert window.grant() == 8
    for index in range(3):
        window.take(index)
    assert window.grant() == 0
    window.take(3)
    assert window.grant() == 4
