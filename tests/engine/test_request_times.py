"""When a request was queued, started and finished, and how old the oldest pin is."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams
from tests.testing.constant_engine import make_constant_engine
from tests.testing.manual_clock import ManualClock

BLOCK_SIZE = 4


@pytest.fixture
def engine(clock: ManualClock) -> Engine:
    return make_constant_engine(max_num_seqs=1, max_num_batched_tokens=8, clock=clock)


def prompt(name: str, length: int = 12, **options: Any) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    return Sequence(name, [ord(name)] * length, length, params, b"", **options)


def test_a_request_waits_until_its_first_step(engine: Engine, clock: ManualClock) -> None:
    first, second = prompt("a"), prompt("b")
    for clock.now, sequence in ((1.0, first), (2.0, second)):
        engine.add_request(sequence)
    clock.now = 3.0
    engine.step()
    assert (first.queued_at, first.started_at, second.started_at) == (1.0, 3.0, 0.0)
    assert engine.num_step_tokens == 8
    while not second.started_at:
        clock.now += 1.0
        engine.step()
    assert first.started_at == 3.0  # later chunks change nothing
    assert first.finished_at == clock.now - 1.0
    assert second.queued_at == 2.0


def test_an_accepted_request_is_queued_when_its_blocks_are_there(engine: Engine, clock: ManualClock) -> None:
    sequence = prompt("a")
    engine.transfers.accept(sequence)
    engine.transfers.reserve("a", lambda _: None)
    engine.transfers.grant_blocks()
    clock.now = 4.0
    engine.transfers.admit("a", 5)
    clock.now = 6.0
    engine.step()
    assert (sequence.queued_at, sequence.started_at) == (4.0, 6.0)


def test_the_oldest_pin_is_a_finished_prefill_or_a_lease(engine: Engine, clock: ManualClock) -> None:
    assert engine.oldest_pin_seconds == 0.0
    sequence = prompt("a", stops_after_prefill=True)
    engine.add_request(sequence)
    while not engine.is_idle:
        clock.now += 1.0
        engine.step()
    finished_at = clock.now
    clock.now += 5.0
    assert engine.pins.pin("lease", sequence.block_hashes)
    clock.now += 2.0
    assert engine.oldest_pin_seconds == clock.now - finished_at == 7.0
    engine.abort("a")
    assert engine.oldest_pin_seconds == 2.0
    engine.pins.unpin("lease")
    assert engine.oldest_pin_seconds == 0.0
    engine.check_conservation()
