"""Speculative decoding: the same tokens with the same bits, whatever proposes the draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import GeneratedToken, Sequence
from quire.engine.speculation.draft_proposer import DraftProposer
from quire.engine.speculation.ngram_proposer import NgramProposer
from quire.engine.speculation.speculator import Acceptance, DraftRequest, Proposer, Speculator
from quire.engine.weights.loader import LoadedModel, load_model
from quire.sampling.params import SamplingParams
from tests.testing.tiny_engine import BLOCK_SIZE, CPU, make_engine, make_request

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "opt", "gpt_oss"]

TinyModel = Callable[[str], Path]
SampledTokens = dict[tuple[str, int], list[GeneratedToken]]


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


def make_drafting_engine(
    model: LoadedModel,
    draft_source: str | LoadedModel | None = None,
    *,
    num_blocks: int = 512,
    num_swap_blocks: int = 0,
    max_num_batched_tokens: int = 64,
    num_tokens: int = 4,
) -> Engine:
    """Return an engine with a draft model or, for any text, with prompt lookup; None means no drafts."""
    proposer: Proposer = NgramProposer()
    if isinstance(draft_source, LoadedModel):
        memory = KvMemory(draft_source.kv_shape(BLOCK_SIZE), num_blocks, CPU)
        limits = SchedulerConfig(BLOCK_SIZE, 16, max_num_batched_tokens)
        proposer = DraftProposer(draft_source, memory, limits, model.eos_token_ids)
    speculator = Speculator(proposer, num_tokens)
    return make_engine(
        model,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=max_num_batched_tokens,
        speculator=None if draft_source is None else speculator,
    )


def make_requests(
    temperature: float, lengths: tuple[int, ...] = (1, 15, 30, 47, 100), **params: Any
) -> list[Sequence]:
    values = {"temperature": temperature, "max_tokens": 24, "num_logprobs": 2, **params}
    return [make_request(str(n), make_repetitive_prompt(n), seed=n, **values) for n in lengths]


def make_repetitive_prompt(length: int) -> list[int]:
    """Return a prompt that repeats itself, so that there is something to look up."""
    part = Random(length).choices(range(2, 320), k=-(-length // 3))
    return (part * 3)[:length]


def run_staggered(engine: Engine, requests: list[Sequence]) -> SampledTokens:
    """Run requests to their ends, one more with each step; return what was sampled."""
    outputs: SampledTokens = {}
    waiting = list(requests)
    while waiting or not engine.is_idle:
        if waiting:
            engine.add_request(waiting.pop(0))
        for update in engine.step():
            tokens = outputs.setdefault((update.sequence.attempt_id, update.sequence.index), [])
            tokens += update.tokens
        engine.check_conservation()
    assert engine.pool.counts.used == 0
    for request in requests:
        num_tokens = sum(len(tokens) for (name, _), tokens in outputs.items() if name == request.attempt_id)
        assert request.tally.num_generated_tokens == num_tokens, "rejected drafts are not counted"
    return outputs


def token_ids(outputs: SampledTokens) -> dict[tuple[str, int], list[int]]:
    return {name: [each.token_id for each in tokens] for name, tokens in outputs.items()}


def counts(engine: Engine) -> tuple[int, int]:
    assert engine.speculator is not None
    return engine.speculator.counts


# --- the same tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_those_without_drafts(
    load: Callable[[str], LoadedModel],
    load_draft: Callable[[str], LoadedModel],
    architecture: str,
    temperature: float,
) -> None:
    model = load(architecture)
    expected = run_staggered(make_drafting_engine(model), make_requests(temperature))
    for draft_source in ("ngram", load_draft(architecture)):
        engine = make_drafting_engine(model, draft_source)
        got = run_staggered(engine, make_requests(temperature))
        assert token_ids(got) == token_ids(expected)
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
    params: dict[str, Any],
) -> None:
    expected = run_staggered(make_drafting_engine(load("llama")), make_requests(temperature, **params))
    for draft_source in ("ngram", load_draft("llama")):
        engine = make_drafting_engine(load("llama"), draft_source)
        assert run_staggered(engine, make_requests(temperature, **params)) == expected
    assert counts(engine)[0] > 0


@pytest.mark.parametrize(("num_swap_blocks", "num_tokens"), [(0, 7), (64, 1)])
def test_few_blocks_and_a_small_budget(
    load: Callable[[str], LoadedModel],
    load_draft: Callable[[str], LoadedModel],
    num_swap_blocks: int,
    num_tokens: int,
) -> None:
    lengths = (30, 31, 32)
    expected = run_staggered(make_drafting_engine(load("llama")), make_requests(1.0, lengths))
    for draft_source in ("ngram", load_draft("llama")):
        engine = make_drafting_engine(
            load("llama"),
            draft_source,
            num_blocks=6,
            num_swap_blocks=num_swap_blocks,
            max_num_batched_tokens=16,
            num_tokens=num_tokens,
        )
        assert run_staggered(engine, make_requests(1.0, lengths)) == expected
        assert engine.preemption.num_preempted > 0
    assert counts(engine)[1] > 0


# --- how many -----------------------------------------------------------------------------------------------


def test_acceptance_forgets() -> None:
    acceptance = Acceptance()
    assert acceptance.rate == 1.0
    for _ in range(100):
        acceptance.record_verification(4, 0)
    assert acceptance.rate < 0.2
    for _ in range(100):
        acceptance.record_verification(4, 4)
    assert acceptance.rate > 0.9


class Recorder:
    """Proposes as many zeros as are requested."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        self.lengths += [num_tokens for _, num_tokens in requests]
        return [[0] * num_tokens for _, num_tokens in requests]


def decode(rate: float, num_steps: int = 300) -> list[int]:
    """Return how many draft tokens were requested in each step if each is right with probability ``rate``."""
    recorder, random = Recorder(), Random(0)
    speculator = Speculator(recorder, 4)
    sequence = Sequence("r", [1, 2], 2, SamplingParams(), b"")
    for _ in range(num_steps):
        sequence.draft_token_ids = []
        speculator.propose([DraftRequest(sequence, 9)])
        if num_drafted := len(sequence.draft_token_ids):
            num_accepted = 0
            while num_accepted < num_drafted and random.random() < rate:
                num_accepted += 1
            speculator.record_verification(sequence, num_drafted, num_accepted)
    return recorder.lengths


def test_a_sequence_that_accepts_half_of_its_drafts_keeps_getting_them() -> None:
    assert decode(rate=0.5) == [4] * 300


def test_a_sequence_that_accepts_no_drafts_stops_getting_them() -> None:
    assert decode(rate=0.0) == [4] * 18


def test_one_sequence_that_accepts_no_drafts_does_not_stop_another() -> None:
    recorder = Recorder()
    speculator = Speculator(recorder, 4)
    one, other = (Sequence(name, [1, 2], 2, SamplingParams(), b"") for name in ("one", "other"))
    for _ in range(50):
        speculator.record_verification(one, 4, 0)
    speculator.propose([DraftRequest(one, 3), DraftRequest(other, 2)])
    assert (one.draft_token_ids, other.draft_token_ids) == ([], [0, 0])
