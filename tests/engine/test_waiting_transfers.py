"""Transfers with cached prefixes that wait for each other's blocks: the newest gives way to the oldest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.engine import Engine
from quire.engine.sampling_params import SamplingParams
from quire.engine.sequence import Sequence

BLOCK_SIZE, NUM_BLOCKS = 4, 8


@pytest.fixture
def engine(make_constant_engine: Callable[..., Engine]) -> Engine:
    return make_constant_engine(max_num_seqs=4, max_num_batched_tokens=64)


def prompt(name: str, token: int, num_blocks: int) -> Sequence:
    length = num_blocks * BLOCK_SIZE
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return Sequence(name, [token] * length, length, params, b"")


def run(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def test_the_newest_gives_way_to_the_oldest(engine: Engine) -> None:
    for token in (2, 3):
        engine.add_request(prompt(f"cache {token}", token, 3))
        run(engine)
    settled: dict[str, bool] = {}
    assert engine.transfers.accept(prompt("old", 2, 6)) == 3
    assert engine.transfers.accept(prompt("new", 3, 6)) == 3
    engine.transfers.reserve("old", lambda given: settled.update(old=given))
    engine.transfers.grant_blocks()
    # Six of eight blocks are held, and each of the two wants three more.
    assert not settled
    engine.transfers.reserve("new", lambda given: settled.update(new=given))
    engine.transfers.grant_blocks()
    assert settled == {"new": False, "old": True}
    engine.transfers.admit("old", 5)
    run(engine)
    engine.check_conservation()
    assert engine.pool.counts.used == 0
    assert not engine.groups


def test_nobody_gives_way_while_another_request_will_give_blocks_back(engine: Engine) -> None:
    engine.add_request(prompt("cache", 2, 3))
    run(engine)
    engine.add_request(prompt("running", 3, 4))
    engine.step()
    settled: list[bool] = []
    assert engine.transfers.accept(prompt("waiting", 2, 6)) == 3
    engine.transfers.reserve("waiting", settled.append)
    engine.transfers.grant_blocks()
    assert not settled
    run(engine)
    assert settled == [True]
    engine.abort("waiting")
    engine.check_conservation()
