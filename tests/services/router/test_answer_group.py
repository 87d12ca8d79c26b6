"""Answers that are computed together, and what each continues with after a failure."""

from __future__ import annotations

from typing import cast

import pytest

from quire.protos import inference_pb2 as pb
from quire.sampling.params import BeamParams, SamplingParams
from quire.services.router.outputs.answer_group import AnswerGroup, Death
from quire.services.router.outputs.output import OutputAssembler
from quire.services.router.workers.worker import Worker

PROMPT = [10, 11, 12]
DEATHS = (Death(cast(Worker, "d1"), is_hang=False),)


class Answer:
    """An answer with a number of tokens."""

    def __init__(self, index: int, num_tokens: int, *, is_finished: bool = False) -> None:
        self.index = index
        self.token_ids = list(range(num_tokens))
        self.finish_reason = pb.FINISH_REASON_STOP if is_finished else pb.FINISH_REASON_UNSPECIFIED


def group(*answers: Answer, params: SamplingParams | None = None) -> AnswerGroup:
    params = params or SamplingParams(n=len(answers), seed=2**64 - 1)
    return AnswerGroup(
        "r",
        "r",
        PROMPT,
        params,
        cast("list[OutputAssembler]", list(answers)),
        attempt=2,
        num_retries=1,
        deaths=DEATHS,
    )


def test_a_single_answer_continues_after_its_tokens() -> None:
    single = group(Answer(0, 2))
    assert single.token_ids == [*PROMPT, 0, 1]
    assert single.num_prefilled_tokens == len(single.token_ids)
    assert not single.must_split


def test_several_answers_start_from_the_prompt_whose_last_token_decode_computes() -> None:
    several = group(Answer(0, 0), Answer(1, 0))
    assert several.token_ids == PROMPT
    assert several.num_prefilled_tokens == len(PROMPT) - 1
    assert not several.must_split, "without tokens they are still alike"


@pytest.mark.parametrize("counts", [(1, 0), (0, 3), (2, 2)])
def test_several_answers_with_tokens_continue_apart(counts: tuple[int, int]) -> None:
    several = group(*(Answer(index, count) for index, count in enumerate(counts)))
    assert several.must_split
    assert several.output_token_ids == []
    assert several.num_tokens == min(counts)


def test_each_unfinished_answer_keeps_its_own_random_numbers() -> None:
    several = group(Answer(0, 1), Answer(1, 2, is_finished=True), Answer(2, 3))
    parts = several.split()
    assert [part.answers[0].index for part in parts] == [0, 2]
    assert [part.sequence_id for part in parts] == ["r-0", "r-2"]
    # Answer i samples with the seed + i, and seeds are numbers of 64 bits.
    assert [(part.params.n, part.params.seed) for part in parts] == [(1, 2**64 - 1), (1, 1)]
    assert [part.output_token_ids for part in parts] == [[0], [0, 1, 2]]
    assert {(part.attempt, part.num_retries, part.deaths) for part in parts} == {(2, 1, DEATHS)}
    assert not any(part.must_split for part in parts)


def test_it_is_finished_with_its_last_answer() -> None:
    assert not group(Answer(0, 1, is_finished=True), Answer(1, 1)).is_finished
    assert group(Answer(0, 1, is_finished=True), Answer(1, 1, is_finished=True)).is_finished
    assert not group(Answer(0, 0)).is_beam_search
    assert group(Answer(0, 0), params=SamplingParams(beam=BeamParams(2))).is_beam_search
