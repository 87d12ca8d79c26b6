"""Speculative decoding: the same tokens with the same bits, whatever proposes the draft tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from quire.engine.config import EngineConfig
from quire.engine.draft_proposer import DraftProposer
from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel, load_model
from quire.engine.ngram_proposer import NgramProposer, continue_repetition
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence, TokenLogprobs
from quire.engine.speculation import Acceptance, DraftRequest, Proposer, Speculator, StepCost
from quire.engine.speculators import DraftModelError, check_same_tokens, load_draft_model
from quire.models.random_model import make_random_model
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "opt", "gpt_oss"]
ROUNDED = ["gpt_oss"]
"""The sums of experts depend on a step's tokens."""

TinyModel = Callable[[str], Path]
Outputs = dict[tuple[str, int], list[tuple[int, TokenLogprobs | None]]]


def hash_block(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent + str(tokens).encode()).digest()[:16]


@pytest.fixture(scope="module")
def load_draft(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], LoadedModel]:
    """Return a function that loads a draft for an architecture: its model with noise, often right."""
    loaded: dict[str, LoadedModel] = {}

    def get(architecture: str) -> LoadedModel:
        if architecture not in loaded:
            model = AutoModelForCausalLM.from_pretrained(tiny_model(architecture))
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
            folder = tmp_path_factory.mktemp(f"{architecture}-draft")
            model.save_pretrained(folder)
            loaded[architecture] = load_model(str(folder), "float32", CPU)
        return loaded[architecture]

    return get


def make_engine(
    model: LoadedModel,
    draft_source: str | LoadedModel | None = None,
    *,
    num_blocks: int = 512,
    num_swap_blocks: int = 0,
    budget: int = 64,
    max_num_seqs: int = 16,
    num_tokens: int = 4,
) -> Engine:
    shape, limits = model.kv_shape(BLOCK_SIZE), SchedulerConfig(BLOCK_SIZE, max_num_seqs, budget)
    proposer: Proposer | None = None
    if isinstance(draft_source, LoadedModel):
        memory = KvMemory(draft_source.kv_shape(BLOCK_SIZE), num_blocks, CPU)
        proposer = DraftProposer(draft_source, memory, limits, hash_block, model.eos_token_ids)
    elif draft_source is not None:
        proposer = NgramProposer()
    return Engine(
        model,
        KvMemory(shape, num_blocks, CPU),
        limits,
        hash_block,
        parts=EngineParts(
            swap_memory=KvMemory(shape, num_swap_blocks, CPU) if num_swap_blocks else None,
            # A clock that stands still makes every draft token worth its time.
            speculator=proposer and Speculator(proposer, num_tokens, clock=lambda: 0.0),
        ),
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Return a prompt that repeats itself, so that there is something to look up."""
    part = Random(seed * 1000 + length).choices(range(2, 320), k=-(-length // 3))
    return (part * 3)[:length]


def make_requests(
    temperature: float, lengths: tuple[int, ...] = (1, 15, 30, 47, 100), **params: object
) -> list[Sequence]:
    values = {"max_tokens": 24, "ignore_eos": True, "num_logprobs": 2, **params}
    return [
        Sequence(
            str(length),
            make_prompt(length),
            length,
            SamplingParams(temperature=temperature, seed=length, **values),  # type: ignore[arg-type]
            b"root",
        )
        for length in lengths
    ]


def run(engine: Engine, requests: list[Sequence]) -> Outputs:
    """Run requests, of which some come later, to their ends; return what was sampled."""
    outputs: Outputs = {}
    waiting = list(requests)
    while waiting or not engine.is_idle:
        if waiting:
            engine.add_request(waiting.pop(0))
        for update in engine.step():
            tokens = outputs.setdefault((update.sequence.attempt_id, update.sequence.index), [])
            tokens += update.tokens
        engine.check_conservation()
    assert engine.pool.counts.used == 0
    return outputs


def token_ids(outputs: Outputs) -> dict[tuple[str, int], list[int]]:
    return {name: [token_id for token_id, _ in tokens] for name, tokens in outputs.items()}


def counts(engine: Engine) -> tuple[int, int]:
    assert engine.speculator is not None
    return engine.speculator.counts


# --- the same tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_those_without_drafts(
    load: Callable[[str], LoadedModel],
    load_draft: Callable[[str], LoadedModel],
    architecture: str,
    temperature: float,
) -> None:
    model = load(architecture)
    expected = run(make_engine(model), make_requests(temperature))
    for draft_source in ("ngram", load_draft(architecture)):
        engine = make_engine(model, draft_source)
        got = run(engine, make_requests(temperature))
        assert token_ids(got) == token_ids(expected)
        if architecture not in ROUNDED:
            assert got == expected, "the logprobs differ in their last bits"
        drafted, accepted = counts(engine)
        assert drafted > accepted
        if isinstance(draft_source, LoadedModel):
            assert accepted > 10


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
        {"bad_words": tuple((a, b) for a in range(2, 60) for b in range(2, 60))},
        {"min_tokens": 12, "ignore_eos": False, "stop_token_ids": frozenset(range(2, 100))},
        {"logit_bias": tuple((token, 5.0) for token in range(2, 40))},
        {"allowed_token_ids": frozenset(range(5, 20)), "top_p": 0.9},
        {"stop_token_ids": frozenset(range(2, 30)), "top_k": 30, "min_p": 0.01, "typical_p": 0.9},
        {"n": 3},
        {"num_prompt_logprobs": 1},
        {"max_tokens": 3},
    ],
    ids=lambda params: "-".join(params),
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rules_see_draft_tokens_as_if_they_were_sampled(
    load: Callable[[str], LoadedModel],
    load_draft: Callable[[str], LoadedModel],
    temperature: float,
    params: dict[str, object],
) -> None:
    expected = run(make_engine(load("llama")), make_requests(temperature, **params))
    for draft_source in ("ngram", load_draft("llama")):
        engine = make_engine(load("llama"), draft_source)
        assert run(engine, make_requests(temperature, **params)) == expected
    assert counts(engine)[0] > 0


@pytest.mark.parametrize(("num_swap_blocks", "num_tokens"), [(0, 7), (64, 1)])
def test_few_blocks_and_a_small_budget(
    load: Callable[[str], LoadedModel],
    load_draft: Callable[[str], LoadedModel],
    num_swap_blocks: int,
    num_tokens: int,
) -> None:
    lengths = (30, 31, 32)
    expected = run(make_engine(load("llama")), make_requests(1.0, lengths))
    for draft_source in ("ngram", load_draft("llama")):
        engine = make_engine(
            load("llama"),
            draft_source,
            num_blocks=6,
            num_swap_blocks=num_swap_blocks,
            budget=16,
            num_tokens=num_tokens,
        )
        assert run(engine, make_requests(1.0, lengths)) == expected
        assert engine.preemption.num_preempted > 0
    assert counts(engine)[1] > 0


def test_the_model_as_its_own_draft_is_always_right(load: Callable[[str], LoadedModel]) -> None:
    model = load("llama")
    for temperature in (0.0, 1.0):
        engine = make_engine(model, model, num_tokens=4)
        num_steps = 0
        engine.add_request(make_requests(temperature, max_tokens=41)[1])
        while not engine.is_idle:
            num_steps += bool(engine.step())
        drafted, accepted = counts(engine)
        assert drafted == accepted > 30
        # 1 token with the prompt, then 5 a step, but one step of 32 that goes without.
        assert num_steps <= 1 + 8 + 1


def test_a_draft_that_finished_sequences_used_has_its_blocks_again(
    load: Callable[[str], LoadedModel],
) -> None:
    model = load("llama")
    shape, limits = model.kv_shape(BLOCK_SIZE), SchedulerConfig(BLOCK_SIZE, 4, 64)
    drafter = DraftProposer(model, KvMemory(shape, 32, CPU), limits, hash_block, frozenset())
    parts = EngineParts(speculator=Speculator(drafter, 4, clock=lambda: 0.0))
    engine = Engine(model, KvMemory(shape, 512, CPU), limits, hash_block, parts=parts)
    for seed in range(5):
        engine.add_request(
            Sequence(str(seed), make_prompt(90, seed), 90, SamplingParams(max_tokens=9), b"root")
        )
        while not engine.is_idle:
            engine.step()
            drafter.pool.check_conservation()
    assert drafter.propose([]) == []
    assert drafter.pool.counts.used == 0


# --- the proposers ------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_ngram_proposes_what_followed_the_longest_latest_repetition(tokens: list[int], k: int) -> None:
    def suffix_length(end: int) -> int:
        """Return how many tokens before ``end`` equal the last ones, up to 8."""
        length = 0
        while length < min(8, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    ends = [end for end in range(1, len(tokens)) if suffix_length(end) >= 2]
    got = continue_repetition(torch.tensor(tokens, dtype=torch.int32).numpy(), k)
    if not ends:
        assert got == []
        return
    best = max(ends, key=lambda end: (suffix_length(end), end))
    text = list(tokens)
    for index in range(k):
        text.append(text[best + index])
    assert got == text[len(tokens) :]


def test_another_vocabulary_is_refused(
    tmp_path: Path, load: Callable[[str], LoadedModel], tiny_model: TinyModel
) -> None:
    other = make_random_model("llama", tmp_path / "other", vocab_size=400)
    model = load("llama")
    config = EngineConfig(
        str(tiny_model("llama")), dtype="float32", speculation="draft", draft_model=str(other)
    )
    with pytest.raises(DraftModelError, match="has logits for 400 tokens, the model for 320"):
        load_draft_model(config, model, CPU)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<bos>"', '"<begin>"'))
    with pytest.raises(DraftModelError, match="different vocabularies"):
        check_same_tokens(str(other), str(tiny_model("llama")))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculation": "guess"}, "speculation must be one of"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 16"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens must be from 1 to 16"),
        ({"speculation": "draft"}, "give both or neither"),
        ({"speculation": "ngram", "draft_model": "model"}, "give both or neither"),
    ],
)
def test_bad_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)


# --- how many -----------------------------------------------------------------------------------------------


def test_the_cost_of_a_token_is_the_slope() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.record_step(8, 0.010)
    assert cost.token_seconds == 0.0  # nothing is known yet
    for index in range(50):
        cost.record_step(8 + index % 3, 0.010 + 0.001 * (index % 3))
    assert cost.token_seconds == pytest.approx(0.001, rel=0.05)


def test_acceptance_forgets() -> None:
    acceptance = Acceptance()
    assert acceptance.rate(0.5) == 0.5
    for _ in range(100):
        acceptance.record_verification(4, 0)
    assert acceptance.rate(1.0) < 0.2
    for _ in range(100):
        acceptance.record_verification(4, 4)
    assert acceptance.rate(0.0) > 0.9


class Recorder:
    """Proposes as many zeros as are requested."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        self.lengths += [num_tokens for _, num_tokens in requests]
        return [[0] * num_tokens for _, num_tokens in requests]


def decode(rate: float, token_seconds: float, num_steps: int = 300) -> list[int]:
    """Return how many draft tokens were requested in steps of 10 ms, of which a share ``rate`` is right."""
    recorder, random = Recorder(), Random(0)
    speculator = Speculator(recorder, 4, clock=lambda: 0.0)
    sequence = Sequence("r", [1, 2], 2, SamplingParams(), b"")
    for _ in range(num_steps):
        sequence.draft_token_ids = []
        speculator.propose([DraftRequest(sequence, 9)])
        num_drafted = len(sequence.draft_token_ids)
        num_accepted = 0
        while num_accepted < num_drafted and random.random() < rate:
            num_accepted += 1
        if num_drafted:
            speculator.record_verification(sequence, num_drafted, num_accepted)
        seconds = 0.010 + token_seconds * num_drafted
        speculator.record_step(1 + num_drafted, 1 + num_accepted, seconds, seconds)
    return recorder.lengths[-100:]


def test_right_drafts_that_cost_little_are_requested() -> None:
    assert set(decode(rate=0.95, token_seconds=0.0005)) == {4}


def test_drafts_that_do_not_pay_are_tried_now_and_then() -> None:
    assert set(decode(rate=0.3, token_seconds=0.008, num_steps=1000)[-5:]) == {1}


def test_fewer_drafts_the_less_they_are_right() -> None:
    assert mean(decode(0.5, 0.002)) < mean(decode(0.8, 0.002)) <= 4
