"""Parallel samples: the same tokens as one by one, over shared blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.model_loader import LoadedModel
from quire.engine.request_errors import RequestTooLongError
from tests.engine.tiny_engine import RecordingRunner, make_engine, make_prompt, make_request, run


@pytest.mark.parametrize("length", [1, 16, 40])
def test_each_of_eight_samples_is_what_its_seed_gives(
    load: Callable[[str], LoadedModel], length: int
) -> None:
    prompt = make_prompt(length)
    together = run(make_engine(load("llama")), make_request("r", prompt, n=8, seed=70))
    for index in range(8):
        single = run(make_engine(load("llama")), make_request("a", prompt, seed=70 + index))
        assert together["r", index] == single["a", 0]
    assert len({tuple(tokens) for tokens in together.values()}) == 8


def test_samples_share_the_prompt_and_copy_only_its_last_block(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), make_runner=RecordingRunner)
    assert isinstance(engine.runner, RecordingRunner)
    engine.add_request(make_request("r", make_prompt(100), n=8))
    while not engine.groups["r"].is_forked:
        engine.step()
    assert engine.pool.counts.used == 7
    engine.step()
    # Six full blocks for all, and the seventh once for each: the last owner keeps the original.
    assert engine.pool.counts.used == 6 + 8
    assert [len(schedule.copies) for schedule in engine.runner.schedules] == [7]


def test_what_can_never_fit_is_refused_at_once(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), num_blocks=10)
    with pytest.raises(RequestTooLongError, match="take 13 blocks; this worker has 10: ask for fewer"):
        engine.add_request(make_request("r", make_prompt(20), n=4))
    with pytest.raises(RequestTooLongError, match="8 sequences of one request; this worker runs at most 4"):
        make_engine(load("llama"), max_num_seqs=4).add_request(make_request("r", make_prompt(20), n=8))
    assert run(engine, make_request("r", make_prompt(20), n=2))
