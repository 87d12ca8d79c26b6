"""What a pool computes that knows which blocks are used again."""

from __future__ import annotations

import pytest

from quire.benchmarks.agents import Sent, clairvoyant
from quire.cli.bench.summary import OK, RequestRecord


def sent(*prompt: int) -> Sent:
    """Return a request with a block of each of these tokens, and no answer."""
    tokens = [token for token in prompt for _ in range(16)]
    return Sent(tokens, RequestRecord(OK, 0.0, 1.0, (), len(tokens), 0, 0))


@pytest.mark.parametrize(
    ("num_blocks", "computed"), [(4, [32, 32, 1]), (2, [32, 32, 1]), (1, [32, 32, 16]), (0, [32, 32, 32])]
)
def test_blocks_that_are_used_again_stay(num_blocks: int, computed: list[int]) -> None:
    assert clairvoyant([sent(1, 2), sent(3, 4), sent(1, 2)], num_blocks) == computed


def test_the_beginning_of_a_chain_stays_longest() -> None:
    assert clairvoyant([sent(1, 2), sent(3, 4), sent(1, 2), sent(3, 4)], 3) == [32, 32, 1, 16]
