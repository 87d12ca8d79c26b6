"""Penalties, biases and bans: against a plain reading of their definitions and against transformers."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from quire.engine.scheduling.scheduler import MAX_SCORED_TOKENS
from quire.engine.sequences.logits_processing import process_logits
from quire.engine.sequences.sampler import sample
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams, SamplingParams
from tests.testing.tiny_engine import make_engine, make_prompt, run
from tests.testing.tiny_engine import make_request as make_any_request
from tests.testing.tiny_models import generate_greedy, load_reference

VOCAB_SIZE = 12
EOS = frozenset({0})

token = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """Draw a sequence with any of the rules."""
    max_tokens = 8
    biases = draw(st.dictionaries(token, st.floats(-100, 100, width=32), max_size=3))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 9)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.frozensets(token, max_size=2)),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.25, 0.5])),
        logit_bias=tuple(biases.items()),
        allowed_token_ids=draw(st.frozensets(token, max_size=4)),
        bad_words=tuple(draw(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3))),
        num_logprobs=draw(st.sampled_from([None, 2])),
    )
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    output = draw(st.lists(token, max_size=6))
    return Sequence("r", prompt + output, len(prompt), params, b"")


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn((num_rows, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed))


def by_definition(logits: list[float], sequence: Sequence) -> list[float]:
    """Process one row, one token after the other."""
    params, ids = sequence.params, sequence.token_ids
    output = ids[sequence.num_prompt_tokens :]
    banned = {word[-1] for word in params.bad_words if [*ids, word[-1]][-len(word) :] == list(word)}
    if params.allowed_token_ids:
        banned |= set(range(VOCAB_SIZE)) - params.allowed_token_ids
    if len(output) < params.min_tokens:
        banned |= params.stop_token_ids | EOS
    biases = dict(params.logit_bias)
    result = []
    for candidate, logit in enumerate(logits):
        value = -math.inf if candidate in banned else logit + biases.get(candidate, 0.0)
        if candidate in ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(candidate)
        value -= params.presence_penalty * (candidate in output)
        result.append(value)
    return result


@settings(max_examples=300)
@given(sequences())
def test_a_row_follows_the_definitions(sequence: Sequence) -> None:
    logits = make_logits(1)
    [processed] = process_logits(logits, [sequence], EOS)
    assert processed.tolist() == pytest.approx(by_definition(logits[0].tolist(), sequence), abs=1e-4)
    assert torch.equal(logits, make_logits(1))


@settings(max_examples=100)
@given(st.lists(sequences(), min_size=1, max_size=6), st.integers(0, 5))
def test_a_row_does_not_depend_on_its_batch(batch: list[Sequence], place: int) -> None:
    row = place % len(batch)
    logits = make_logits(len(batch))
    together = sample(logits, batch, EOS)
    single = sample(logits[row : row + 1], [batch[row]], EOS)
    assert (row in together.errors) == (0 in single.errors)
    if row not in together.errors:
        assert (together.token_ids[row], together.logprobs[row]) == (single.token_ids[0], single.logprobs[0])


@settings(max_examples=100)
@given(sequences(), st.lists(token, min_size=1, max_size=80), st.integers(0, 80))
def test_counts_kept_over_many_steps_are_those_of_a_fresh_sequence(
    sequence: Sequence, more: list[int], fork_at: int
) -> None:
    original = sequence
    for step, token_id in enumerate(more):
        if process_logits(make_logits(1), [sequence], EOS).max() == -math.inf:
            break  # no token may follow
        if step == fork_at:
            original, sequence = sequence, sequence.copy(index=1)
        sequence.token_ids.append(token_id)
    for kept in (original, sequence):
        fresh = Sequence("r", kept.token_ids[:], kept.num_prompt_tokens, kept.params, b"")
        assert torch.equal(
            process_logits(make_logits(1), [kept], EOS), process_logits(make_logits(1), [fresh], EOS)
        )


def test_rows_without_rules_are_not_touched() -> None:
    logits = make_logits(2)
    plain = Sequence("r", [1, 2], 2, SamplingParams(), b"")
    assert process_logits(logits, [plain, plain], EOS) is logits
    biased = Sequence("r", [1, 2], 2, SamplingParams(logit_bias=((3, 5.0),)), b"")
    processed = process_logits(logits, [plain, biased], EOS)
    assert torch.equal(processed[0], logits[0])
    assert (processed[1] - logits[1]).nonzero().flatten().tolist() == [3]


def test_logprobs_are_those_of_the_model_before_the_rules() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((3, 100.0),), num_logprobs=1)
    logits = make_logits(1)
    [logprobs] = sample(logits, [Sequence("r", [1], 1, params, b"")], EOS).logprobs
    assert logprobs is not None
    expected = torch.log_softmax(logits[0], dim=-1)
    assert logprobs.logprob == pytest.approx(float(expected[3]))
    assert logprobs.top[0][0] == int(expected.argmax())


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_processors_of_transformers(seed: int) -> None:
    random = Random(seed)
    ids = random.choices(range(VOCAB_SIZE), k=8)
    bad_words = [[ids[-2], ids[-1], 4], [7], [ids[-1], 9], [ids[0], 5]]
    biases = {3: 1.5, 9: -2.0}
    params = SamplingParams(
        repetition_penalty=1.3, bad_words=tuple(map(tuple, bad_words)), logit_bias=tuple(biases.items())
    )
    processors: list[LogitsProcessor] = [
        SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases.items()}),
        RepetitionPenaltyLogitsProcessor(1.3),
        NoBadWordsLogitsProcessor(bad_words),
    ]
    expected = logits = make_logits(1, seed)
    for processor in processors:
        expected = processor(torch.tensor([ids]), expected)
    processed = process_logits(logits, [Sequence("r", ids, 3, params, b"")], EOS)
    torch.testing.assert_close(processed, expected, rtol=0, atol=1e-6)


# --- with a model -----------------------------------------------------------------------------------------

RULES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "bad_words": ((17,), (44, 45)),
    "logit_bias": ((60, 0.5),),
}
IN_TRANSFORMERS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "bad_words_ids": [[17], [44, 45]],
    "sequence_bias": {(60,): 0.5},
}


def make_request(name: str, prompt: list[int], **params: Any) -> Sequence:
    return make_any_request(name, prompt, **{"temperature": 0.0, "max_tokens": 32, **params})


@pytest.mark.parametrize("num_beams", [1, 4])
def test_tokens_are_those_of_transformers(folder: Path, model: LoadedModel, num_beams: int) -> None:
    prompt = make_prompt(20)
    options = {"num_beams": num_beams, **IN_TRANSFORMERS}
    expected = generate_greedy(load_reference(folder), prompt, 32, **options)
    beam = BeamParams(num_beams) if num_beams > 1 else None
    answers = run(make_engine(model), make_request("r", prompt, beam=beam, **RULES))
    assert answers["r", 0] == expected


def test_preempted_and_forked_sequences_keep_their_counts(model: LoadedModel) -> None:
    rules = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.8, **RULES}
    expected = {
        (name, index): run(make_engine(model), make_request(name, make_prompt(30, seed), seed=index, **rules))
        for seed, name in enumerate("abc")
        for index in range(2)
    }
    requests = [make_request(name, make_prompt(30, seed), n=2, **rules) for seed, name in enumerate("abc")]
    crowded = make_engine(model, num_blocks=14)
    together = run(crowded, *requests)
    assert crowded.preemption.num_preempted > 0
    assert together == {(name, index): tokens[name, 0] for (name, index), tokens in expected.items()}


def test_a_request_resumed_from_its_tokens_continues_unchanged(model: LoadedModel) -> None:
    rules = {"frequency_penalty": 0.7, "min_tokens": 20, **RULES}
    prompt = make_prompt(25)
    whole = run(make_engine(model), make_request("r", prompt, **rules))["r", 0]
    resumed = make_request("r", prompt, **rules)
    resumed.token_ids += whole[:10]
    assert run(make_engine(model), resumed)["r", 0] == whole[10:]


def test_beams_take_only_allowed_tokens_even_if_they_are_few(model: LoadedModel) -> None:
    few = frozenset({30, 31})
    request = make_request("r", make_prompt(9), beam=BeamParams(4), max_tokens=5, allowed_token_ids=few)
    answers = run(make_engine(model), request)
    assert len(answers) == 4
    assert all(set(tokens) <= few for tokens in answers.values())


# --- the prompt's logprobs --------------------------------------------------------------------------------


def reference_logprobs(folder: Path, prompt: list[int]) -> torch.Tensor:
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([prompt])).logits[0], dim=-1)


@pytest.mark.parametrize("budget", [16, 128])
def test_prompt_logprobs_are_the_models_whole_and_in_chunks(
    folder: Path, model: LoadedModel, budget: int
) -> None:
    prompt = make_prompt(70)
    engine = make_engine(model, max_num_batched_tokens=budget)
    others = [make_request(str(length), make_prompt(length), num_prompt_logprobs=0) for length in (1, 2, 33)]
    run(engine, make_request("warm", prompt))
    scored = make_request("r", prompt, num_prompt_logprobs=3)
    run(engine, scored, *others)
    assert [len(other.prompt_logprobs) for other in others] == [0, 1, 32]
    assert scored.num_cached_tokens == 0
    expected = reference_logprobs(folder, prompt)
    assert len(scored.prompt_logprobs) == len(prompt) - 1
    for position, (logprob, top) in enumerate(scored.prompt_logprobs):
        assert logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-3)
        values, ids = expected[position].topk(3)
        assert [token_id for token_id, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-3)
    run(engine, again := make_request("again", prompt))
    assert again.num_cached_tokens == 69


def test_a_prompt_that_is_scored_leaves_room_in_each_step(model: LoadedModel) -> None:
    engine = make_engine(model, max_num_batched_tokens=256)
    engine.add_request(scored := make_request("r", make_prompt(150), num_prompt_logprobs=1, max_tokens=1))
    num_computed = []
    while not engine.is_idle:
        engine.step()
        num_computed.append(scored.num_computed_tokens)
    assert num_computed == [MAX_SCORED_TOKENS, 2 * MAX_SCORED_TOKENS, 150]


def test_a_preempted_prompt_is_scored_once(model: LoadedModel) -> None:
    prompts = [make_prompt(40, seed) for seed in range(3)]
    singles = [make_request("r", prompt, num_prompt_logprobs=1) for prompt in prompts]
    for request in singles:
        run(make_engine(model), request)
    crowd = [
        make_request(str(seed), prompt, num_prompt_logprobs=1, max_tokens=60)
        for seed, prompt in enumerate(prompts)
    ]
    crowded = make_engine(model, num_blocks=12, max_num_batched_tokens=16)
    run(crowded, *crowd)
    assert crowded.preemption.num_preempted > 0
    for one, among in zip(singles, crowd, strict=True):
        assert len(among.prompt_logprobs) == 39
        for expected, found in zip(one.prompt_logprobs, among.prompt_logprobs, strict=True):
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
