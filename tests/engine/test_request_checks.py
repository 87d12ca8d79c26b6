"""Requests that can never run are refused when they arrive, with the limit and the remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.errors import KvBudgetError, RequestTooLongError
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.scheduling.request_checks import RequestChecks
from quire.engine.sequences.block_tables import BlockTables
from tests.testing.tiny_engine import BLOCK_SIZE, make_prompt, make_request


def make_checks(
    num_blocks: int = 10, max_model_len: int = 1000, has_windows: bool = False, can_rank_blocks: bool = True
) -> RequestChecks:
    tables = BlockTables(BlockPool(num_blocks), BLOCK_SIZE)
    return RequestChecks(has_windows, tables, 4, max_model_len, can_rank_blocks)


def test_the_longest_prompt_has_room_for_one_token() -> None:
    checks = make_checks(max_model_len=100)
    checks.check(make_request("r", make_prompt(99)))
    with pytest.raises(RequestTooLongError, match="100 prompt tokens; this worker takes at most 99"):
        checks.check(make_request("r", make_prompt(100)))


def test_all_sequences_of_a_request_fit_into_one_step() -> None:
    checks = make_checks()
    checks.check(make_request("r", make_prompt(2), n=4, max_tokens=3))
    with pytest.raises(RequestTooLongError, match="5 sequences of one request; this worker runs at most 4"):
        checks.check(make_request("r", make_prompt(2), n=5, max_tokens=3))


def test_a_request_fits_into_the_pool_at_its_longest() -> None:
    checks = make_checks(num_blocks=10)
    checks.check(make_request("r", make_prompt(20), n=2, max_tokens=40))
    with pytest.raises(RequestTooLongError, match="take 13 blocks; this worker has 10: ask for fewer"):
        checks.check(make_request("r", make_prompt(20), n=4, max_tokens=40))


def test_the_length_of_the_model_bounds_the_blocks_of_a_request() -> None:
    request = make_request("r", make_prompt(20), n=2, max_tokens=10_000)
    make_checks(num_blocks=10, max_model_len=80).check(request)
    with pytest.raises(RequestTooLongError, match="up to 160 tokens take 19 blocks"):
        make_checks(num_blocks=10, max_model_len=160).check(request)


@given(st.integers(1, 200), st.integers(1, 200))
def test_one_sequence_is_refused_only_if_the_pool_cannot_hold_it(length: int, max_tokens: int) -> None:
    request = make_request("r", [5] * length, max_tokens=max_tokens)
    if length + max_tokens <= 10 * BLOCK_SIZE:
        make_checks(num_blocks=10).check(request)
    else:
        with pytest.raises(RequestTooLongError):
            make_checks(num_blocks=10).check(request)


def test_a_budget_holds_three_blocks_at_least_and_needs_full_attention() -> None:
    request = make_request("r", make_prompt(20), kv_budget_tokens=48)
    make_checks().check(request)
    with pytest.raises(KvBudgetError, match="sliding windows"):
        make_checks(has_windows=True).check(request)
    with pytest.raises(KvBudgetError, match="layers of different shapes"):
        make_checks(can_rank_blocks=False).check(request)
    with pytest.raises(KvBudgetError, match="must be at least 48, 3 blocks; got 47"):
        make_checks().check(make_request("r", make_prompt(20), kv_budget_tokens=47))
