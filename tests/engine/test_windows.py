"""Models whose layers all forget: what no token sees any more is given back, and the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from quire.engine.errors import RequestTooLongError
from quire.engine.sequences.sequence import NO_BLOCK
from quire.engine.weights.loader import LoadedModel
from tests.testing import windows
from tests.testing.tiny_engine import BLOCK_SIZE, make_engine, output
from tests.testing.windows import NUM_NEW, WINDOW, CheckGreedy, finish, make_request

make_windowed_engine = partial(make_engine, max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture
def model(load: Callable[[str], LoadedModel]) -> LoadedModel:
    return load("mistral")


@pytest.mark.parametrize(
    ("architecture", "window"),
    [
        ("mistral", WINDOW),
        ("llama", None),
        ("gemma2", None),
        ("gemma3", None),
        ("gpt_oss", None),
        ("lfm2", None),
    ],
)
def test_a_model_has_a_window_if_every_layer_has_one(
    load: Callable[[str], LoadedModel], architecture: str, window: int | None
) -> None:
    assert load(architecture).window == window


@pytest.mark.parametrize("length", [1, 40, 150])
def test_memory_is_bounded_by_the_window(model: LoadedModel, check_greedy: CheckGreedy, length: int) -> None:
    """Eight blocks hold 128 tokens; the sequence has up to 350."""
    engine = make_windowed_engine(model, num_blocks=8)
    request = make_request("r", length)
    engine.add_request(request)
    assert finish(engine) <= 8
    check_greedy("mistral", request.token_ids[:length], output(request), NUM_NEW)


def test_a_decode_holds_only_its_window(model: LoadedModel) -> None:
    engine = make_windowed_engine(model, num_blocks=64)
    request = make_request("r", 100, max_tokens=300)
    engine.add_request(request)
    while request.num_output_tokens < 200:
        engine.step()
    assert len(request.held_blocks) <= WINDOW // BLOCK_SIZE + 2
    assert engine.pool.counts.cached > 10  # what was given back can be found still
    engine.abort("r")


@pytest.mark.slow
@pytest.mark.parametrize("is_swapped", [True, False])
def test_preempted_windows_are_restored(
    model: LoadedModel, check_greedy: CheckGreedy, is_swapped: bool
) -> None:
    """Three equal samples of each prompt: they share its blocks, and write blocks of their own."""
    engine = make_windowed_engine(model, num_blocks=16, num_swap_blocks=24, prefers_swap=is_swapped)
    windows.check_preemption(
        engine, 3, is_swapped=is_swapped, architecture="mistral", check_greedy=check_greedy
    )


def test_samples_share_a_window(model: LoadedModel) -> None:
    expected: list[list[int]] = []
    together: dict[int, list[int]] = {}
    for index in range(4):
        engine = make_windowed_engine(model, num_blocks=64)
        request = make_request("r", 70, temperature=1.0, seed=index, max_tokens=80)
        engine.add_request(request)
        finish(engine)
        expected.append(output(request))
    engine = make_windowed_engine(model, num_blocks=20)
    engine.add_request(make_request("r", 70, temperature=1.0, n=4, max_tokens=80))
    while not engine.is_idle:
        for update in engine.step():
            together.setdefault(update.sequence.index, []).extend(t.token_id for t in update.tokens)
    assert [together[index] for index in range(4)] == expected
    engine.check_conservation()


def test_a_prefix_hit_takes_the_last_window_of_the_whole_chain(
    model: LoadedModel, check_greedy: CheckGreedy
) -> None:
    engine = make_windowed_engine(model, num_blocks=64)
    first, second = make_request("first", 150), make_request("second", 150)
    engine.add_request(first)
    finish(engine)
    engine.add_request(second)
    engine.step()
    assert second.num_cached_tokens == 149
    assert len(second.held_blocks) < 9
    finish(engine)
    assert output(first) == output(second)
    check_greedy("mistral", first.token_ids[:150], output(first), NUM_NEW)


def test_a_transfer_brings_only_the_window(model: LoadedModel, check_greedy: CheckGreedy) -> None:
    prefill, decode = make_windowed_engine(model, num_blocks=64), make_windowed_engine(model, num_blocks=8)
    there, here = make_request("r", 150), make_request("r", 150)
    there.stops_after_prefill = True
    first_block = decode.transfers.accept(here)
    assert first_block == (150 + 1 - WINDOW) // BLOCK_SIZE
    windows.compute_and_reserve(prefill, decode, there)
    assert len(here.held_blocks) <= WINDOW // BLOCK_SIZE + 2
    for index in range(first_block, 10):
        assert there.block_table[index] != NO_BLOCK
        decode.memory.write(here.block_table[index], prefill.memory.read(there.block_table[index]))
    decode.transfers.admit("r", there.token_ids[-1])
    prefill.abort("r")
    prefill.check_conservation()
    assert finish(decode) <= 4
    check_greedy("mistral", here.token_ids[:150], output(here), NUM_NEW)
    assert decode.pool.counts.cached == 0  # no prompt can find blocks without those before them


def test_more_samples_than_the_pool_has_windows_are_refused(model: LoadedModel) -> None:
    engine = make_windowed_engine(model, num_blocks=8)
    with pytest.raises(RequestTooLongError, match="this worker has 8: ask for fewer sequences"):
        engine.add_request(make_request("r", 100, n=8))
