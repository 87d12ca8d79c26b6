"""Transfers: what they take at their arrival, when they get their blocks, and which of them gives way."""

from __future__ import annotations

import pytest

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.sampling.params import SamplingParams
from tests.testing.constant_engine import make_constant_engine

BLOCK_SIZE, NUM_BLOCKS = 4, 8


@pytest.fixture
def engine() -> Engine:
    return make_constant_engine(max_num_seqs=4, max_num_batched_tokens=64)


def prompt(name: str, token: int, num_blocks: int, max_tokens: int = 2) -> Sequence:
    length = num_blocks * BLOCK_SIZE
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, [token] * length, length, params, b"")


def run(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def reserve(engine: Engine, name: str) -> list[bool]:
    """Ask for the blocks of a transfer; return a list that gets the outcome."""
    outcome: list[bool] = []
    engine.transfers.reserve(name, outcome.append)
    engine.transfers.grant_blocks()
    return outcome


def one_waits(engine: Engine) -> list[bool]:
    """Accept two transfers; the blocks suffice for the first one. Return the outcome of the second one."""
    engine.transfers.accept(prompt("first", 2, 5))
    engine.transfers.accept(prompt("second", 3, 4))
    assert reserve(engine, "first") == [True]
    return reserve(engine, "second")


def test_blocks_are_allocated_only_when_they_are_reserved(engine: Engine) -> None:
    engine.add_request(prompt("cache", 2, 3))
    run(engine)
    sequence = prompt("r", 2, 6)
    assert engine.transfers.accept(sequence) == 3
    assert sequence.status == SequenceStatus.TRANSFERRING
    assert engine.pool.counts.used == len(sequence.block_table) == 3
    assert reserve(engine, "r") == [True]
    assert engine.pool.counts.used == len(sequence.block_table) == 6
    update = engine.transfers.admit("r", 5)
    assert update.num_computed_tokens == 24
    assert sequence.token_ids[24:] == [5]
    run(engine)
    assert sequence.token_ids[24:] == [5, 5]
    engine.check_conservation()


def test_with_several_samples_this_worker_computes_the_last_prompt_token(engine: Engine) -> None:
    sequence = Sequence("r", [2] * 8, 8, SamplingParams(n=2, max_tokens=2, ignore_eos=True), b"")
    assert sequence.num_transferred_tokens == 7
    engine.transfers.accept(sequence)
    assert reserve(engine, "r") == [True]
    assert engine.transfers.admit("r", None).num_computed_tokens == 7
    assert sorted(update.sequence.index for update in engine.step()) == [0, 1]
    run(engine)
    engine.check_conservation()


def test_a_transfer_gets_all_of_its_blocks_or_none(engine: Engine) -> None:
    outcome = one_waits(engine)
    assert not outcome
    assert engine.transfers.num_waiting == 1
    assert engine.pool.counts.used == 5
    engine.abort("first")
    engine.transfers.grant_blocks()
    assert outcome == [True]
    assert engine.transfers.num_waiting == 0


def test_a_transfer_waits_behind_an_older_request(engine: Engine) -> None:
    engine.add_request(prompt("running", 2, 5))
    engine.step()
    engine.add_request(prompt("waiting", 3, 4))
    engine.step()
    engine.transfers.accept(prompt("transfer", 4, 1))
    # Two blocks are left, and one of them is for it. The older request that lacks blocks comes first.
    outcome = reserve(engine, "transfer")
    assert not outcome
    run(engine)
    assert outcome == [True]
    engine.abort("transfer")
    engine.check_conservation()


def test_an_aborted_transfer_is_informed(engine: Engine) -> None:
    outcome = one_waits(engine)
    engine.abort("second")
    assert outcome == [False]
    with pytest.raises(KeyError):
        engine.transfers.reserve("second", outcome.append)


def test_a_first_token_that_ends_the_request(engine: Engine) -> None:
    engine.transfers.accept(prompt("r", 2, 2, max_tokens=1))
    assert reserve(engine, "r") == [True]
    assert engine.transfers.admit("r", 5).status == SequenceStatus.FINISHED_LENGTH
    assert not engine.groups
    assert engine.pool.counts.used == 0


def test_the_newest_gives_way_to_the_oldest(engine: Engine) -> None:
    for token in (2, 3):
        engine.add_request(prompt(f"cache {token}", token, 3))
        run(engine)
    outcomes: dict[str, bool] = {}
    assert engine.transfers.accept(prompt("old", 2, 6)) == 3
    assert engine.transfers.accept(prompt("new", 3, 6)) == 3
    engine.transfers.reserve("old", lambda given: outcomes.update(old=given))
    engine.transfers.grant_blocks()
    # Six of eight blocks are held, and each of the two wants three more.
    assert not outcomes
    engine.transfers.reserve("new", lambda given: outcomes.update(new=given))
    engine.transfers.grant_blocks()
    assert outcomes == {"new": False, "old": True}
    engine.transfers.admit("old", 5)
    run(engine)
    engine.check_conservation()
    assert engine.pool.counts.used == 0
    assert not engine.groups


def test_no_transfer_gives_way_while_another_request_will_free_blocks(engine: Engine) -> None:
    engine.add_request(prompt("cache", 2, 3))
    run(engine)
    engine.add_request(prompt("running", 3, 4))
    engine.step()
    assert engine.transfers.accept(prompt("waiting", 2, 6)) == 3
    outcomes = reserve(engine, "waiting")
    assert not outcomes
    run(engine)
    assert outcomes == [True]
    engine.abort("waiting")
    engine.check_conservation()
