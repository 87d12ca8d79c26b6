"""What a router remembers of the prompts that it sent, compared with a plain list of all of them."""

from __future__ import annotations

import math
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from quire.routing.history import PrefixHistory
from tests.testing.manual_clock import ManualClock

WORKERS = "ab"
# A prompt is a path from the root of a small tree. Its k-th hash says how it got there.
paths = st.text("xy", max_size=6)


def hashes(path: str) -> list[bytes]:
    return [path[: depth + 1].encode() for depth in range(len(path))]


@given(
    prompts=st.lists(st.tuples(st.sampled_from(WORKERS), paths, st.integers(0, 2)), max_size=15),
    asked=paths,
    max_age=st.integers(0, 6),
)
def test_without_a_limit_it_equals_a_list_of_what_was_sent(
    prompts: list[tuple[str, str, int]], asked: str, max_age: int
) -> None:
    clock = ManualClock()
    history = PrefixHistory(clock)
    sent_at: dict[tuple[str, bytes], float] = {}
    for worker, path, seconds in prompts:
        clock.now += seconds
        history.note(worker, hashes(path), 1000)
        sent_at |= {(worker, each): clock.now for each in hashes(path)}
    for worker in WORKERS:
        is_recent = [sent_at.get((worker, each), -math.inf) >= clock.now - max_age for each in hashes(asked)]
        assert history.num_cached(worker, hashes(asked), max_age) == len(list(takewhile(bool, is_recent)))


@given(prompts=st.lists(paths, min_size=1, max_size=15), max_blocks=st.integers(0, 8))
def test_no_more_is_remembered_than_the_pool_holds(prompts: list[str], max_blocks: int) -> None:
    history = PrefixHistory(ManualClock())
    for path in prompts:
        history.note("a", hashes(path), max_blocks)
    tree = {each for path in prompts for each in hashes(path)}
    known = {each for each in tree if history.num_cached("a", hashes(each.decode()), 1.0) == len(each)}
    assert len(known) == min(len(tree), max_blocks), "what is forgotten is never in the middle of a prompt"
    newest = hashes(prompts[-1])
    assert history.num_cached("a", newest, 1.0) == min(len(newest), max_blocks)


def test_only_a_removed_worker_is_forgotten() -> None:
    history = PrefixHistory(ManualClock())
    for worker in WORKERS:
        history.note(worker, hashes("xyx"), 10)
    history.forget("a")
    history.forget("unknown")
    assert [history.num_cached(worker, hashes("xyx"), 1.0) for worker in WORKERS] == [0, 3]
