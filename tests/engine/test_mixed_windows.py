"""Models of which some layers forget: only the parts of blocks that no window shows are given back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.errors import RequestTooLongError
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.window_pool import WindowPool
from quire.engine.model.check import UnsupportedModelError
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel, load_model
from tests.testing import windows
from tests.testing.tiny_engine import BLOCK_SIZE, CPU, make_engine, make_prompt, output, run, run_in_order
from tests.testing.tiny_engine import make_request as make_any_request
from tests.testing.tiny_models import make_random_model
from tests.testing.windows import NUM_NEW, CheckGreedy, finish, make_request

MIXED = ["gemma2", "gemma3", "gpt_oss", "lfm2", "lfm3", "llama4"]
make_small_engine = partial(make_engine, max_num_seqs=8, max_num_batched_tokens=32)
Load = Callable[[str], LoadedModel]


def frames_for(model: LoadedModel, num_tokens: int, num_in_step: int = 0) -> float:
    """Return how many whole blocks a sequence needs at most: its window, a step, and what all tokens see."""
    shape = model.kv_shape(BLOCK_SIZE)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    num_seen = -(-(shape.window - 1) // BLOCK_SIZE) + 2 + num_in_step // BLOCK_SIZE
    num_window_frames = shape.num_frames - shape.lasting_frames
    return (num_blocks * shape.lasting_frames + num_seen * num_window_frames) / shape.num_frames


@pytest.mark.parametrize("architecture", MIXED)
def test_a_decode_holds_its_window_and_what_full_layers_see(load: Load, architecture: str) -> None:
    model = load(architecture)
    engine = make_small_engine(model, num_blocks=64)
    request = make_request("r", 100, max_tokens=300)
    engine.add_request(request)
    while request.num_output_tokens < 280:
        engine.step()
    assert len(request.block_table) == 24
    assert engine.pool.counts.used <= frames_for(model, 380) + 1
    assert engine.pool.counts.used < 24 * (0.75 if architecture != "gemma3" else 0.4)
    engine.abort("r")
    engine.check_conservation()
    assert engine.pool.counts.used == 0


@pytest.mark.parametrize("architecture", MIXED)
@pytest.mark.parametrize("length", [1, 150])
def test_a_sequence_may_be_longer_than_the_pool(
    load: Load, check_greedy: CheckGreedy, architecture: str, length: int
) -> None:
    """The pool has whole blocks for 256 or 192 tokens; the sequence has up to 350."""
    engine = make_small_engine(load(architecture), num_blocks=12 if architecture == "gemma3" else 16)
    request = make_request("r", length)
    engine.add_request(request)
    finish(engine)
    check_greedy(architecture, request.token_ids[:length], output(request), NUM_NEW)


@pytest.mark.parametrize("architecture", MIXED)
def test_cold_warm_and_stripped_prompts_give_the_same(
    load: Load, check_greedy: CheckGreedy, architecture: str
) -> None:
    engine = make_small_engine(load(architecture), num_blocks=40)
    answers, cached = [], []
    for number in range(5):
        request = make_request(str(number), 150, max_tokens=40)
        engine.add_request(request)
        finish(engine)
        answers.append(output(request))
        cached.append(request.num_cached_tokens)
        if number == 1:  # take the window parts of all blocks that can spare them
            pool = engine.pool
            assert isinstance(pool, WindowPool)
            num_free = pool.counts.free
            pool.free(pool.allocate(num_free + 1))
        if number == 2:  # other prompts take everything
            for other in range(3):
                engine.add_request(make_request(f"other{other}", 300, 1 + other, max_tokens=20))
                finish(engine)
    check_greedy(architecture, make_prompt(150), answers[0], 40)
    assert answers == [answers[0]] * 5
    assert cached[0] == 0
    assert cached[1] >= 144
    assert cached[4] >= 144


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "is_swapped"),
    [(name, is_swapped) for name in ("gemma3", "lfm2", "llama4") for is_swapped in (True, False)],
)
def test_preempted_sequences_are_restored(
    load: Load, check_greedy: CheckGreedy, architecture: str, is_swapped: bool
) -> None:
    num_blocks = 17 if architecture == "gemma3" else 24
    engine = make_small_engine(
        load(architecture), num_blocks=num_blocks, num_swap_blocks=80, prefers_swap=is_swapped
    )
    windows.check_preemption(
        engine, 2, is_swapped=is_swapped, architecture=architecture, check_greedy=check_greedy
    )


@pytest.mark.parametrize("architecture", MIXED)
def test_a_transfer_brings_bare_blocks_behind_the_window(
    load: Load, check_greedy: CheckGreedy, architecture: str
) -> None:
    model = load(architecture)
    prefill, decode = make_small_engine(model, num_blocks=64), make_small_engine(model, num_blocks=24)
    there, here = make_request("r", 150), make_request("r", 150)
    there.stops_after_prefill = True
    assert decode.transfers.accept(here) == 0
    windows.compute_and_reserve(prefill, decode, there)
    num_bare = (150 + 1 - model.kv_shape(BLOCK_SIZE).window) // BLOCK_SIZE
    for index in range(10):
        is_bare = index < num_bare
        assert decode.memory.is_bare(here.block_table[index]) == is_bare
        payload = prefill.memory.payload_or_copy(there.block_table[index], is_bare=is_bare)
        assert len(payload) in decode.memory.shape.payload_sizes[:2]
        decode.memory.write(here.block_table[index], payload)
    with pytest.raises(ValueError, match="a block has"):
        decode.memory.write(here.block_table[0], prefill.memory.payload(there.block_table[9]))
    decode.transfers.admit("r", there.token_ids[-1])
    prefill.abort("r")
    prefill.check_conservation()
    finish(decode)
    check_greedy(architecture, here.token_ids[:150], output(here), NUM_NEW)
    # The next turn of the chat finds what was pushed, and what was computed here.
    again = make_any_request("again", here.token_ids[:324], temperature=0.0, max_tokens=26)
    decode.add_request(again)
    finish(decode)
    assert again.num_cached_tokens >= 320
    assert output(again) == here.token_ids[324:350]


def test_sequences_that_share_blocks_read_those_that_one_of_them_has_dropped(load: Load) -> None:
    # After a swap, tables show blocks that are bare again only to the sequences whose windows begin later.
    model = load("gemma2")
    own = [0, 40, 20, 20, 40, 90, 0, 0, 0]
    most = [20, 80, 80, 5, 5, 40, 40, 40, 5]
    prompts = [
        make_prompt(length, 200 + i) if length else make_prompt(70, 1) + make_prompt(3, 100 + i)
        for i, length in enumerate(own)
    ]

    def requests() -> list[Sequence]:
        return [
            make_any_request(str(i), prompt, temperature=0.0, max_tokens=number, ignore_eos=True)
            for i, (prompt, number) in enumerate(zip(prompts, most, strict=True))
        ]

    engine = make_engine(model, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=64, num_swap_blocks=8)
    together = run(engine, *requests())
    for each in requests():
        name = (each.attempt_id, 0)
        assert run(make_engine(model, num_blocks=64), each)[name] == together[name]


@pytest.mark.parametrize("architecture", MIXED)
def test_8_bit_blocks_in_frames_give_the_bits_of_flat_ones(load: Load, architecture: str) -> None:
    model = load(architecture)
    found = []
    for is_flat in (False, True):
        shape = model.kv_shape(BLOCK_SIZE, "int8")
        memory = KvMemory(shape.flat if is_flat else shape, 64, torch.device("cpu"))
        engine = Engine(model, memory, SchedulerConfig(BLOCK_SIZE, 8, 32))
        request = make_request("r", 90, max_tokens=60)
        found += run_in_order(engine, request)
    assert found[0] == found[1]


def test_too_long_requests_are_refused(load: Load) -> None:
    engine = make_small_engine(load("gemma2"), num_blocks=8)
    with pytest.raises(RequestTooLongError, match="this worker has 8"):
        engine.add_request(make_request("r", 100))


def test_a_hit_rate_falls_smoothly(load: Load) -> None:
    """Eight chats take turns: the fewer blocks there are, the less is found, and never suddenly nothing."""
    hits = []
    for num_blocks in (64, 32, 24):
        engine = make_small_engine(load("gemma2"), num_blocks=num_blocks)
        chats = [make_prompt(40, seed) for seed in range(4)]
        num_found = 0
        for turn in range(3):
            for number, chat in enumerate(chats):
                request = make_any_request(f"{turn}-{number}", chat, temperature=0.0, max_tokens=20)
                engine.add_request(request)
                finish(engine)
                num_found += request.num_cached_tokens
                chats[number] = [*request.token_ids, *make_prompt(10, turn)]
        hits.append(num_found)
    assert hits[0] > hits[2] > 0
    assert hits[0] >= hits[1] >= hits[2]


def test_chunks_need_a_layer_that_sees_all_tokens(tmp_path: Path) -> None:
    """Otherwise freed blocks are left out of tables, and positions would not tell where a chunk begins."""
    folder = make_random_model("llama4", tmp_path, no_rope_layers=[1, 1, 1])
    with pytest.raises(UnsupportedModelError, match="none sees all tokens"):
        load_model(str(folder), "float32", CPU)
