"""Beam search: the same answers as transformers, and when a search ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.engine.errors import RequestFailedError
from quire.engine.sequences.beam_search import BeamSearch, answers, choose_extensions
from quire.engine.sequences.sequence import SequenceStatus
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams, EarlyStopping
from tests.testing.tiny_engine import make_engine, make_prompt, make_request, run
from tests.testing.tiny_models import load_reference, search_beams

TinyModel = Callable[[str], Path]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "lfm2"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_beam_search_equals_transformers(
    load: Callable[[str], LoadedModel], tiny_model: TinyModel, architecture: str, width: int
) -> None:
    cases: list[tuple[int, float, EarlyStopping]] = [(1, 1.0, False), (33, 0.5, True), (64, 2.0, "never")]
    for length, penalty, early in cases:
        prompt = make_prompt(length)
        beam = BeamParams(width, penalty, early)
        request = make_request("r", prompt, beam=beam, max_tokens=24, ignore_eos=False)
        actual = run(make_engine(load(architecture)), request)
        options = {"length_penalty": penalty, "early_stopping": early, "max_new_tokens": 24}
        answers, _ = search_beams(load_reference(tiny_model(architecture)), prompt, width, **options)
        for index, tokens in enumerate(answers):
            assert actual["r", index] == tokens, f"answer {index} of {length} prompt tokens, {beam}"


def test_beams_share_blocks(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"))
    engine.add_request(make_request("r", make_prompt(160), beam=BeamParams(4), max_tokens=64))
    most = 0
    while not engine.is_idle:
        engine.step()
        most = max(most, engine.pool.counts.used)
    assert most <= 10 + 4 * 4


# --- the algorithm without an engine -----------------------------------------------------------------------

EOS = 0


def logprobs(*rows: dict[int, float]) -> torch.Tensor:
    """Return ``[num_beams, 4]`` with these values; all other tokens are forbidden."""
    values = torch.full((len(rows), 4), float("-inf"))
    for row, tokens in enumerate(rows):
        for token_id, value in tokens.items():
            values[row, token_id] = value
    return values


def test_the_best_extensions_of_all_beams_are_kept() -> None:
    search = BeamSearch(BeamParams(2), 10, frozenset({EOS}))
    assert search.advance(logprobs({1: -1.0, 2: -2.0, 3: -9.0}), [[]]) == [(0, 1), (0, 2)]
    # -1 - 3 is less than -2 - 0.5 and -2 - 1: both beams of the next step extend the second one.
    assert search.advance(logprobs({1: -3.0}, {1: -0.5, 3: -1.0}), [[1], [2]]) == [(1, 1), (1, 3)]
    assert not search.is_done
    assert not search.hypotheses


def test_an_answer_that_ends_is_kept_with_its_score() -> None:
    search = BeamSearch(BeamParams(2, length_penalty=2.0), 10, frozenset({EOS}))
    search.advance(logprobs({1: -1.0, 2: -2.0}), [[]])
    assert search.advance(logprobs({EOS: -1.0, 3: -2.0}, {3: -0.5}), [[1], [2]]) == [(1, 3), (0, 3)]
    assert search.hypotheses == [(-2.0 / 2**2, [1, EOS], True)]


def test_a_candidate_that_ends_an_answer_is_no_beam_if_others_are_missing() -> None:
    search = BeamSearch(BeamParams(3), 10, frozenset({EOS}))
    assert search.advance(logprobs({EOS: -1.0, 3: -2.0}), [[]]) == [(0, 3)]
    assert search.hypotheses == [(-1.0, [EOS], True)]
    assert search.advance(logprobs({3: -1.0}), [[3]]) == [(0, 3)]
    assert search.advance(logprobs({EOS: -1.0}), [[3, 3]]) == []
    assert search.is_done
    assert [tokens for _, tokens, _ in search.hypotheses] == [[EOS], [3, 3, EOS]]


def test_an_answer_ends_at_its_most_tokens() -> None:
    search = BeamSearch(BeamParams(2), 1, frozenset({EOS}))
    assert search.advance(logprobs({1: -1.0, 2: -2.0}), [[]]) == []
    assert search.is_done
    assert search.hypotheses == [(-1.0, [1], False), (-2.0, [2], False)]


def test_a_search_without_any_token_ends_without_an_answer() -> None:
    search = BeamSearch(BeamParams(2), 10, frozenset({EOS}))
    assert search.advance(logprobs({}), [[]]) == []
    assert search.is_done
    assert not search.hypotheses


def test_logits_that_are_not_finite_fail_the_request() -> None:
    search = BeamSearch(BeamParams(2), 10, frozenset({EOS}))
    prompt = make_request("r", [5, 6], beam=BeamParams(2))
    with pytest.raises(RequestFailedError, match="not finite"):
        choose_extensions(search, [prompt], torch.tensor([[1.0, float("nan")]]), frozenset({EOS}))


def test_answers_are_whole_sequences_and_the_best_is_first() -> None:
    search = BeamSearch(BeamParams(2), 1, frozenset({EOS}))
    prompt = make_request("r", [5, 6], beam=BeamParams(2))
    choose_extensions(search, [prompt], torch.tensor([[3.0, 1.0, 2.0, 0.0]]), frozenset({EOS}))
    updates = answers(search, prompt)
    assert [update.sequence.token_ids for update in updates] == [[5, 6, EOS], [5, 6, 2]]
    assert [update.sequence.index for update in updates] == [0, 1]
    assert [update.status for update in updates] == [
        SequenceStatus.FINISHED_STOPPED,
        SequenceStatus.FINISHED_LENGTH,
    ]
    assert [[token.token_id for token in update.tokens] for update in updates] == [[EOS], [2]]
    assert prompt.token_ids == [5, 6]
