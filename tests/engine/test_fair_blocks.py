"""Blocks are given first to clients that hold few, so that a client which fills the pool waits for itself."""

from __future__ import annotations

import pytest

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams
from tests.testing.constant_engine import TOKEN, make_constant_engine

BLOCK_SIZE, NUM_BLOCKS = 4, 40
MOST_STEPS_LOST = 3
"""Steps in which a small request waits until another one has given up its blocks."""
NUM_COSTLY, COSTLY_TOKENS, SMALL_TOKENS = 12, 56, 8


def request(name: str, client: str, num_prompt: int, num_output: int) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    # Each prompt has a root of its own, so that none finds another one's blocks.
    return Sequence(name, [2] * num_prompt, num_prompt, params, name.encode(), client=client)


@pytest.fixture(params=[0, NUM_BLOCKS], ids=["recompute", "swap"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return an engine whose pool is full of a costly client's requests."""
    engine = make_constant_engine(16, 64, num_blocks=NUM_BLOCKS, num_swap_blocks=request.param)
    for number in range(NUM_COSTLY):
        engine.add_request(make_costly(number))
    while not engine.preemption.num_preempted:
        engine.step()
    return engine


def make_costly(number: int) -> Sequence:
    return request(f"costly-{number}", "costly", 4, COSTLY_TOKENS)


def steps_until_ended(engine: Engine, name: str) -> int:
    num_steps = 0
    while name in engine.groups:
        engine.step()
        engine.check_conservation()
        num_steps += 1
    return num_steps


def run_to_end(engine: Engine) -> dict[str, int]:
    """Return how many tokens each request got."""
    sequences = {name: group.prompt for name, group in engine.groups.items()}
    while not engine.is_idle:
        engine.step()
        engine.check_conservation()
    assert engine.pool.counts.used == 0
    return {name: each.num_tokens - each.num_prompt_tokens for name, each in sequences.items()}


def test_a_small_client_does_not_wait_for_one_that_fills_the_pool(engine: Engine) -> None:
    for number in range(3):
        small = request(f"small-{number}", "small", 8, SMALL_TOKENS)
        engine.add_request(small)
        assert steps_until_ended(engine, small.attempt_id) <= SMALL_TOKENS + MOST_STEPS_LOST
        assert small.token_ids[8:] == [TOKEN] * SMALL_TOKENS
    assert set(run_to_end(engine).values()) == {COSTLY_TOKENS}


def test_nor_does_its_transfer(engine: Engine) -> None:
    small = request("small", "small", 8, SMALL_TOKENS)
    engine.transfers.accept(small)
    outcome: list[bool] = []
    engine.transfers.reserve("small", outcome.append)
    for _ in range(2):
        engine.step()
    assert outcome == [True]
    engine.transfers.admit("small", TOKEN)
    assert steps_until_ended(engine, "small") <= SMALL_TOKENS + MOST_STEPS_LOST
    assert set(run_to_end(engine).values()) == {COSTLY_TOKENS}


def test_requests_of_one_client_keep_their_order(engine: Engine) -> None:
    last = request("last", "costly", 8, SMALL_TOKENS)
    engine.add_request(last)
    steps_until_ended(engine, "costly-0")
    assert "last" in engine.groups
    assert not last.block_table


@pytest.mark.parametrize(("num_blocks", "passes"), [(1, True), (3, False)])
def test_a_transfer_passes_another_clients_only_where_that_would_fit_beside(
    num_blocks: int, passes: bool
) -> None:
    """The sender of the older one may have to finish it first, and holds its blocks meanwhile."""
    engine = make_constant_engine(4, 64)
    engine.add_request(request("running", "costly", 12, 30))
    engine.step()
    outcomes: dict[str, bool] = {}
    for name, client, size in (("old", "costly", 6), ("new", "small", num_blocks)):
        engine.transfers.accept(request(name, client, size * BLOCK_SIZE, 1))
        engine.transfers.reserve(name, lambda given, name=name: outcomes.update({name: given}))  # type: ignore[misc]
    engine.step()
    assert outcomes == ({"new": True} if passes else {})
