"""What goes wrong with one request ends it and nothing else: the others get their tokens as without it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.errors import NoTokenLeftError, RequestFailedError
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.sequences.beam_search import BeamSearch
from quire.engine.sequences.sequence import ScheduledSequence, Sequence
from quire.engine.structured_output.grammar import Mask
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams, SamplingParams
from tests.testing.tiny_engine import Outputs, add_tokens, make_engine, updates_of

EOS = 1
Errors = dict[str, RequestFailedError]


class FakeGrammar:
    """Allows some tokens at each position of the output, and breaks after the last."""

    def __init__(self, *allowed: Iterable[int]) -> None:
        self._allowed = [frozenset(each) for each in allowed]
        self._num_prompt_tokens = 20

    def allowed(self, token_ids: list[int]) -> Mask:
        mask = np.zeros(320, dtype=np.bool_)
        mask[list(self._allowed[len(token_ids) - self._num_prompt_tokens])] = True
        return mask

    def copy(self) -> FakeGrammar:
        return self


def make_request(name: str, grammar: Any = None, **params: Any) -> Sequence:
    prompt = Random(name).choices(range(2, 320), k=20)
    sampling = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 7, **params})
    rules = LogitsRules(sampling, len(prompt), grammar) if grammar is not None else None
    return Sequence(name, prompt, len(prompt), sampling, b"root", logits_rules=rules)


def run(engine: Engine, *requests: Sequence) -> tuple[Outputs, Errors]:
    """Run requests to their ends; return the tokens of each sequence, and the errors."""
    outputs: Outputs = {}
    errors: Errors = {}
    for update in updates_of(engine, *requests):
        name = update.sequence.attempt_id
        assert name not in errors, "nothing comes after an error"
        add_tokens(outputs, update)
        if update.error is not None:
            assert update.status.is_finished
            errors[name] = update.error
    assert engine.pool.counts.used == 0
    assert not engine.groups
    return outputs, errors


class PoisonedRunner(ModelRunner):
    """Gives the culprit a logit that is not a number, in each step after its first."""

    def prepare(self, scheduled: list[ScheduledSequence]) -> StepTensors:
        culprits = [row for row, each in enumerate(scheduled) if each.sequence.attempt_id == "culprit"]
        self._poisoned = [row for row in culprits if scheduled[row].sequence.num_computed_tokens]
        return super().prepare(scheduled)

    def forward(self, step: StepTensors) -> torch.Tensor:
        logits = super().forward(step).clone()
        logits[self._poisoned[:1], 11] = math.nan
        return logits


class UnsampledSequence(Sequence):
    """Fails when its fifth token is sampled."""

    @property
    def draw(self) -> bytes:
        if self.num_output_tokens == 4:
            raise OverflowError("scripted")
        return self._draw

    @draw.setter
    def draw(self, encoded: bytes) -> None:
        self._draw = encoded


def neighbours() -> list[Sequence]:
    """Return requests of every kind, to run beside one that fails."""
    return [
        make_request("sampled", temperature=0.9, num_logprobs=2),
        make_request("greedy", temperature=0.0, presence_penalty=1.0),
        make_request("samples", n=3, top_p=0.8, frequency_penalty=0.5),
        make_request("beams", beam=BeamParams(3)),
        make_request("scored", num_prompt_logprobs=2, max_tokens=2),
    ]


@pytest.fixture(scope="module")
def undisturbed(model: LoadedModel) -> Outputs:
    outputs, errors = run(make_engine(model), *neighbours())
    assert not errors
    return outputs


def check_others(outputs: Outputs, undisturbed: Outputs) -> None:
    """Fail unless all neighbours got their tokens."""
    assert {key: tokens for key, tokens in outputs.items() if key[0] != "culprit"} == undisturbed


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"beam": BeamParams(2)}], ids=["single", "samples", "beams"])
def test_a_grammar_that_breaks_ends_only_its_request(
    model: LoadedModel, undisturbed: Outputs, more: dict[str, Any]
) -> None:
    culprit = make_request("culprit", FakeGrammar(range(5, 9), range(9, 15), range(3, 9)), **more)
    outputs, errors = run(make_engine(model), culprit, *neighbours())
    assert "IndexError" in str(errors.pop("culprit"))
    assert not errors
    check_others(outputs, undisturbed)


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"beam": BeamParams(2)}], ids=["single", "samples", "beams"])
def test_logits_that_are_no_numbers_end_only_their_request(
    model: LoadedModel, undisturbed: Outputs, more: dict[str, Any]
) -> None:
    engine = make_engine(model, make_runner=PoisonedRunner)
    culprit = make_request("culprit", **more)
    outputs, errors = run(engine, culprit, *neighbours())
    assert "not finite" in str(errors.pop("culprit"))
    assert not errors
    check_others(outputs, undisturbed)


def test_an_error_in_sampling_is_traced_to_its_row(model: LoadedModel, undisturbed: Outputs) -> None:
    plain = make_request("culprit")
    culprit = UnsampledSequence("culprit", plain.token_ids, plain.num_prompt_tokens, plain.params, b"root")
    outputs, errors = run(make_engine(model), culprit, *neighbours())
    assert str(errors.pop("culprit")) == "OverflowError: scripted"
    assert not errors
    assert len(outputs["culprit", 0]) == 4
    check_others(outputs, undisturbed)


def test_an_error_in_a_search_ends_only_its_request(
    model: LoadedModel, undisturbed: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = BeamSearch.advance

    def breaking(search: BeamSearch, logprobs: torch.Tensor, outputs: list[list[int]]) -> Any:
        if len(logprobs) == 5:
            raise OverflowError("scripted")
        return advance(search, logprobs, outputs)

    monkeypatch.setattr(BeamSearch, "advance", breaking)
    outputs, errors = run(make_engine(model), make_request("culprit", beam=BeamParams(5)), *neighbours())
    assert str(errors.pop("culprit")) == "OverflowError: scripted"
    assert not errors
    check_others(outputs, undisturbed)


def test_a_prefill_that_fails_keeps_its_blocks_until_they_are_released(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking = Mock(side_effect=OverflowError("scripted"))
    monkeypatch.setattr("quire.engine.sequences.sampling_step.rank_tokens", breaking)
    engine = make_engine(model)
    request = make_request("culprit", num_prompt_logprobs=1)
    request.stops_after_prefill = True
    engine.add_request(request)
    [update] = engine.step()
    assert str(update.error) == "OverflowError: scripted"
    assert engine.pool.counts.used == 2
    engine.check_conservation()
    engine.abort("culprit")
    engine.check_conservation()
    assert engine.pool.counts.used == 0


# --- constraints that leave no token ----------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"beam": BeamParams(2)}], ids=["single", "samples", "beams"])
@pytest.mark.parametrize(
    ("grammar", "constraints", "field", "num_tokens"),
    [
        (None, {"allowed_token_ids": frozenset({EOS}), "min_tokens": 3}, "min_tokens", 0),
        (
            None,
            {"allowed_token_ids": frozenset({8, 9}), "stop_token_ids": frozenset({8, 9}), "min_tokens": 2},
            "min_tokens",
            0,
        ),
        (None, {"allowed_token_ids": frozenset({8, 9}), "bad_words": ((8,), (9,))}, "bad_words", 0),
        (
            None,
            {"allowed_token_ids": frozenset({8, 9}), "bad_words": ((8, 8), (8, 9), (9, 8), (9, 9))},
            "bad_words",
            1,
        ),
        (FakeGrammar({5}, {6}), {"allowed_token_ids": frozenset({5})}, "allowed_token_ids", 1),
        (FakeGrammar({5}, {6, 7}), {"bad_words": ((6,), (5, 7))}, "bad_words", 1),
        (FakeGrammar({5}, {EOS}), {"min_tokens": 3, "ignore_eos": False}, "min_tokens", 1),
        (FakeGrammar({5}, {}), {}, "format", 1),
    ],
)
def test_constraints_that_forbid_every_token_end_the_request(
    model: LoadedModel,
    undisturbed: Outputs,
    grammar: FakeGrammar | None,
    constraints: dict[str, Any],
    field: str,
    num_tokens: int,
    more: dict[str, Any],
) -> None:
    culprit = make_request("culprit", grammar, **constraints, **more)
    outputs, errors = run(make_engine(model), culprit, *neighbours())
    error = errors.pop("culprit")
    assert isinstance(error, NoTokenLeftError)
    assert error.field == field
    assert f"after {num_tokens} tokens" in error.problem
    assert not errors
    if "beam" not in more:
        assert len(outputs["culprit", 0]) == num_tokens
    check_others(outputs, undisturbed)


def test_a_beam_search_continues_without_the_beams_that_have_no_extension(model: LoadedModel) -> None:
    allowed = {"allowed_token_ids": frozenset({8, 9}), "bad_words": ((8, 8), (8, 9))}
    outputs, errors = run(make_engine(model), make_request("r", beam=BeamParams(2), max_tokens=6, **allowed))
    assert not errors
    assert set(map(tuple, outputs.values())) == {(9,) * 6, (9,) * 5 + (8,)}


def test_a_beam_search_without_extensions_ends_with_its_finished_beams(model: LoadedModel) -> None:
    grammar = FakeGrammar({5, 6}, {EOS, 7}, {})
    request = make_request("r", grammar, beam=BeamParams(4), ignore_eos=False)
    outputs, errors = run(make_engine(model), request)
    assert not errors
    assert {tuple(tokens) for tokens in outputs.values()} == {(5, EOS), (6, EOS)}
