"""Parallel samples, beams and preemption: the same tokens as one by one, over shared blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel, load_model
from quire.engine.request_errors import RequestTooLongError
from quire.engine.sampling_params import BeamParams, SamplingParams
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence

BLOCK_SIZE = 16
CPU = torch.device("cpu")
TinyModel = Callable[[str], Path]


def hash_block(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent + str(tokens).encode()).digest()[:16]


@pytest.fixture(scope="module")
def load(tiny_model: TinyModel) -> Callable[[str], LoadedModel]:
    """Return a function that loads an architecture's tiny model, once."""
    loaded: dict[str, LoadedModel] = {}

    def get(architecture: str) -> LoadedModel:
        if architecture not in loaded:
            loaded[architecture] = load_model(str(tiny_model(architecture)), "float32", CPU)
        return loaded[architecture]

    return get


def make_engine(
    model: LoadedModel,
    *,
    num_blocks: int = 512,
    num_swap_blocks: int = 0,
    budget: int = 128,
    max_num_seqs: int = 64,
    **config: object,
) -> Engine:
    shape = model.kv_shape(BLOCK_SIZE)
    swap_memory = KvMemory(shape, num_swap_blocks, CPU) if num_swap_blocks else None
    limits = SchedulerConfig(BLOCK_SIZE, max_num_seqs, budget, **config)  # type: ignore[arg-type]
    parts = EngineParts(swap_memory=swap_memory)
    return Engine(model, KvMemory(shape, num_blocks, CPU), limits, hash_block, parts=parts)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return Random(seed * 1000 + length).choices(range(2, 320), k=length)


def make_request(name: str, prompt: list[int], **params: object) -> Sequence:
    values = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 40, "ignore_eos": True, **params}
    return Sequence(name, list(prompt), len(prompt), SamplingParams(**values), b"root")  # type: ignore[arg-type]


def run(engine: Engine, requests: list[Sequence]) -> dict[tuple[str, int], list[int]]:
    """Run requests to their ends; return the tokens of each sequence."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[tuple[str, int], list[int]] = {}
    while not engine.is_idle:
        for sequence, _, tokens, *_ in engine.step():
            outputs.setdefault((sequence.request_id, sequence.index), []).extend(t.token_id for t in tokens)
        engine.check_conservation()
    assert engine.pool.counts.used == 0
    return outputs


@pytest.mark.parametrize("length", [1, 16, 40])
def test_each_of_eight_samples_is_what_its_seed_gives_alone(
    load: Callable[[str], LoadedModel], length: int
) -> None:
    prompt = make_prompt(length)
    together = run(make_engine(load("llama")), [make_request("r", prompt, n=8, seed=70)])
    for index in range(8):
        alone = run(make_engine(load("llama")), [make_request("a", prompt, seed=70 + index)])
        assert together["r", index] == alone["a", 0]
    assert len({tuple(tokens) for tokens in together.values()}) == 8


def test_samples_share_the_prompt_and_copy_only_its_last_block(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"))
    engine.add_request(make_request("r", make_prompt(100), n=8))
    while not engine.groups["r"].is_forked:
        engine.step()
    assert engine.pool.counts.used == 7
    schedules = []
    move_blocks = engine.runner.move_blocks
    engine.runner.move_blocks = lambda schedule: (schedules.append(schedule), move_blocks(schedule))[1]  # type: ignore[method-assign]
    engine.step()
    # Six full blocks for all, and the seventh once for each: the last owner keeps the original.
    assert engine.pool.counts.used == 6 + 8
    assert [len(schedule.copies) for schedule in schedules] == [7]


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_preempted_groups_give_the_same_tokens(load: Callable[[str], LoadedModel], mode: str) -> None:
    requests = [
        ("samples", {"n": 4, "seed": 5}),
        ("greedy", {"temperature": 0.0}),
        ("beams", {"beam": BeamParams(3)}),
        ("more", {"n": 2, "seed": 9}),
    ]

    def make() -> list[Sequence]:
        return [make_request(name, make_prompt(50, i), **params) for i, (name, params) in enumerate(requests)]

    expected = run(make_engine(load("llama")), make())
    engine = make_engine(load("llama"), num_blocks=26, num_swap_blocks=40, preemption=mode)
    assert run(engine, make()) == expected
    assert engine.preemption.num_preempted > 0
    if mode != "auto":
        assert engine.preemption.counts[mode == "recompute"] == engine.preemption.num_preempted


def test_what_can_never_fit_is_refused_at_once(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), num_blocks=10)
    with pytest.raises(RequestTooLongError, match="take 13 blocks; this worker has 10: ask for fewer"):
        engine.add_request(make_request("r", make_prompt(20), n=4))
    with pytest.raises(RequestTooLongError, match="8 sequences of one request; this worker runs at most 4"):
        make_engine(load("llama"), max_num_seqs=4).add_request(make_request("r", make_prompt(20), n=8))
    assert run(engine, [make_request("r", make_prompt(20), n=2)])


def test_the_second_of_two_equal_prompts_waits_for_the_first(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), budget=64)
    prompt = make_prompt(200)
    first, second = make_request("first", prompt), make_request("second", prompt)
    engine.add_request(first)
    engine.add_request(second)
    while not engine.is_idle:
        engine.step()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_beam_search_equals_transformers(
    load: Callable[[str], LoadedModel], tiny_model: TinyModel, architecture: str, width: int
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_model(architecture), dtype=torch.float32, attn_implementation="eager"
    )
    for length, penalty, early in ((1, 1.0, False), (33, 0.5, True), (64, 2.0, "never")):
        prompt = make_prompt(length)
        beam = BeamParams(width, penalty, early)
        request = make_request("r", prompt, beam=beam, max_tokens=24, ignore_eos=False)
        actual = run(make_engine(load(architecture)), [request])
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, length), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            early_stopping=early,
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )
        eos = reference.generation_config.eos_token_id
        for index, row in enumerate(expected[:, length:].tolist()):
            tokens = row[: row.index(eos) + 1] if eos in row else row
            assert actual["r", index] == tokens, f"answer {index} of {length} prompt tokens, {beam}"


def test_beams_share_blocks(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"))
    engine.add_request(make_request("r", make_prompt(160), beam=BeamParams(4), max_tokens=64))
    most = 0
    while not engine.is_idle:
        engine.step()
        most = max(most, engine.pool.counts.used)
    assert most <= 10 + 4 * 4


def test_an_aborted_group_leaves_nothing(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), num_blocks=30, num_swap_blocks=30, preemption="swap")
    for index in range(4):
        engine.add_request(make_request(str(index), make_prompt(60, index), n=3))
    while not engine.preemption.counts.swapped:
        engine.step()
    for index in range(4):
        engine.abort(str(index))
        engine.check_conservation()
    assert engine.is_idle
    assert engine.pool.counts.used == 0
    assert engine.swap_space.num_free == 30
