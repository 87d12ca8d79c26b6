"""Training: the learning rate, the stages, and a run of a few steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.models.training.train import ADVANCE_AT, RATE, STAGES, Curriculum, learning_rate, train


def test_the_rate_rises_is_constant_and_falls() -> None:
    rates = [learning_rate(step, 1000) / RATE for step in range(1001)]
    assert rates[:50] == pytest.approx([0.02 * step for step in range(1, 51)])
    assert rates[50:401] == [1.0] * 351
    assert rates[401:] == pytest.approx([left / 600 for left in range(599, -1, -1)])


def test_stages_get_harder() -> None:
    recitals = [stage for stage in STAGES if stage.is_recital]
    conversations = [stage for stage in STAGES if not stage.is_recital]
    assert (*recitals, *conversations) == STAGES
    assert recitals == sorted(recitals)
    assert conversations == sorted(conversations)


def test_a_stage_opens_when_the_one_before_is_nearly_solved() -> None:
    curriculum = Curriculum()
    assert {curriculum.choose(Random(seed)) for seed in range(50)} == {0}
    steps = 0
    while curriculum.hardest == 0:
        assert curriculum.accuracy[0] < ADVANCE_AT
        curriculum.record(0, accuracy=1.0)
        steps += 1
    assert curriculum.accuracy[0] >= ADVANCE_AT
    assert curriculum.hardest == 1
    assert steps > 1


@pytest.mark.parametrize(("hardest", "solved"), [(3, 1), (len(STAGES) - 1, len(STAGES) - 1)])
def test_an_easier_stage_and_the_last_one_open_nothing(hardest: int, solved: int) -> None:
    curriculum = Curriculum()
    curriculum.hardest = hardest
    for _ in range(100):
        curriculum.record(solved, accuracy=1.0)
    assert curriculum.hardest == hardest


def test_the_hardest_stage_gets_half_until_it_is_solved() -> None:
    curriculum = Curriculum()
    curriculum.hardest = 9
    unsolved = Counter(curriculum.choose(Random(seed)) for seed in range(2000))
    curriculum.accuracy[9] = 1.0
    solved = Counter(curriculum.choose(Random(seed)) for seed in range(2000))
    assert set(unsolved) == set(solved) == set(range(10))
    assert 0.5 < unsolved[9] / 2000 < 0.6
    assert 0.1 < solved[9] / 2000 < 0.25


@pytest.mark.slow
def test_a_run_writes_a_model_that_the_same_run_writes_again(tmp_path: Path) -> None:
    models = []
    for name in ("first", "second"):
        train(tmp_path / name, num_steps=2, num_tokens=256)
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / name))
    first, second = models
    assert first.dtype == torch.bfloat16
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert first.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not first.generation_config.do_sample
