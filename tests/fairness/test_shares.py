"""Shares are fair by weight, at one moment and over time, and none is unused while somebody needs more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.fairness.shares import ServedTokens, fair_shares

CLIENTS = st.integers(0, 40)
DEMANDS = st.dictionaries(CLIENTS, st.integers(0, 40), min_size=1, max_size=12)
WEIGHTS = st.dictionaries(CLIENTS, st.integers(1, 9))
LEVELS = st.dictionaries(CLIENTS, st.floats(0, 200))
CREDIT, STEP = 400.0, 64


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (fair_shares({"a": 2, "b": 9, "c": 9}, 12), {"a": 2, "b": 5, "c": 5}),
        (fair_shares({"a": 9, "b": 9}, 12, weights={"a": 2, "b": 1}), {"a": 8, "b": 4}),
        (fair_shares({"a": 9, "b": 9}, 12, levels={"a": 4, "b": 0}), {"a": 4, "b": 8}),
        (fair_shares({"a": 9, "b": 5}, 12, levels={"a": 100, "b": 0}), {"a": 7, "b": 5}),
        (fair_shares({"b": 9, "a": 9}, 3), {"b": 2, "a": 1}),
        (fair_shares({"a": 0}, 12), {"a": 0}),
    ],
)
def test_examples(shares: dict[str, int], expected: dict[str, int]) -> None:
    assert shares == expected


@given(DEMANDS, st.integers(0, 100), WEIGHTS, LEVELS)
def test_whoever_lacks_something_has_one_token_less_than_its_level_allows_at_most(
    demands: dict[int, int], capacity: int, weights: dict[int, int], levels: dict[int, float]
) -> None:
    shares = fair_shares(demands, capacity, weights, levels)
    assert shares.keys() == demands.keys()
    assert sum(shares.values()) == min(capacity, sum(demands.values()))
    assert all(0 <= share <= demands[key] for key, share in shares.items())

    def level(key: int, num_more: int) -> float:
        return levels.get(key, 0.0) + (shares[key] + num_more) / weights.get(key, 1)

    lacking = [level(key, 1) for key, share in shares.items() if share < demands[key]]
    served = [level(key, -1) for key, share in shares.items() if share]
    assert not lacking or not served or max(served) <= min(lacking) + 1e-6


def step(served: ServedTokens[int], demands: dict[int, int], weights: dict[int, int]) -> dict[int, int]:
    shares = fair_shares(demands, STEP, weights, {key: served.level(key) for key in demands})
    for key, share in shares.items():
        served.serve(key, share, weights.get(key, 1))
    return shares


@given(WEIGHTS, st.lists(DEMANDS, min_size=1, max_size=30))
def test_clients_that_always_want_more_get_tokens_by_their_weights(
    weights: dict[int, int], others: list[dict[int, int]]
) -> None:
    """Whatever others did before and do meanwhile: beside the credit, by a step and a token at most."""
    served = ServedTokens[int](CREDIT)
    first, second = 100, 101
    weights = {**weights, first: 3, second: 1}
    for demands in others:
        step(served, demands, weights)
    gap = served.level(first) - served.level(second)
    assert gap == 0
    totals = {first: 0, second: 0}
    for demands in others * 3:
        shares = step(served, {**demands, first: STEP, second: STEP}, weights)
        for key in totals:
            totals[key] += shares[key]
    assert abs(totals[first] / 3 - totals[second]) <= 2


@given(st.lists(st.integers(0, 3 * STEP), min_size=1, max_size=60))
def test_a_client_that_wants_less_than_its_share_gets_it_before_one_that_floods(arrivals: list[int]) -> None:
    """Each three steps it asks for at most one and a half steps' tokens, its share of them."""
    served = ServedTokens[int](CREDIT)
    for _ in range(round(CREDIT / STEP) + 1):
        step(served, {0: STEP}, {})
    waiting = 0
    for arrival in arrivals:
        waiting += arrival // 2
        for _ in range(3):
            got = step(served, {0: STEP, 1: waiting}, {})[1]
            assert got == min(waiting, STEP)
            waiting -= got


@given(st.lists(st.tuples(CLIENTS, st.integers(0, 500), st.integers(1, 9)), max_size=60))
def test_no_client_is_further_behind_than_the_credit_and_the_levels_of_idle_ones_are_forgotten(
    served_tokens: list[tuple[int, int, int]],
) -> None:
    served = ServedTokens[int](CREDIT)
    for client, num_tokens, weight in served_tokens:
        before = served.level(client)
        served.serve(client, num_tokens, weight)
        assert served.level(client) == before + num_tokens / weight
        highest = max(map(served.level, range(41)))
        assert all(highest - served.level(each) <= CREDIT for each in range(41))
        lowest = served.lowest()
        assert lowest is not None
        assert highest - lowest <= CREDIT


def test_a_newcomer_begins_at_the_lowest_level_of_the_others_and_the_others_keep_theirs() -> None:
    served = ServedTokens[str](CREDIT)
    served.join("first")
    assert served.level("first") == 0
    served.serve("first", 1000)
    served.serve("second", 100)  # from the floor, 600
    assert served.lowest() == served.lowest(but={"first"}) == 700
    served.join("new")
    assert served.level("new") == 700
    assert served.lowest(but={"second", "new"}) == 1000
    assert served.lowest(but={"first", "second", "new"}) is None
    served.serve("first", 50)
    served.join("new")
    assert served.level("new") == 700
    served.serve("first", 300)  # the credit ends at 950
    assert served.level("new") == 950


@given(st.lists(st.dictionaries(st.integers(1, 5), st.integers(1, 4 * STEP)), max_size=80))
def test_nobody_waits_longer_than_the_others_credit(demands: list[dict[int, int]]) -> None:
    served = ServedTokens[int](CREDIT)
    served.serve(0, 1000)
    num_others = 5
    most_steps = num_others * CREDIT / STEP + 1
    num_waited = 0
    for others in demands + [dict.fromkeys(range(1, num_others + 1), STEP)] * 60:
        num_waited = 0 if step(served, {**others, 0: STEP}, {})[0] else num_waited + 1
        assert num_waited <= most_steps
