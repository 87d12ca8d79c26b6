"""The curriculum: when a stage opens, and what is trained meanwhile."""

from __future__ import annotations

from collections import Counter
from random import Random

from quire.models.training.curriculum import ADVANCE_AT, STAGES, Progress


def test_stages_get_harder() -> None:
    recitals = [stage for stage in STAGES if stage.recital]
    conversations = [stage for stage in STAGES if not stage.recital]
    assert (*recitals, *conversations) == STAGES
    assert recitals == sorted(recitals)
    assert conversations == sorted(conversations)


def test_only_the_first_stage_is_open_at_first() -> None:
    progress = Progress()
    assert {progress.choose(Random(seed)) for seed in range(50)} == {0}


def test_a_stage_opens_when_the_one_before_is_nearly_solved() -> None:
    progress = Progress()
    steps = 0
    while progress.stage == 0:
        assert progress.accuracy[0] < ADVANCE_AT
        progress.record(0, loss=0.1, accuracy=1.0)
        steps += 1
    assert progress.accuracy[0] >= ADVANCE_AT
    assert progress.stage == 1
    assert progress.step == steps > 1


def test_an_easier_stage_opens_nothing() -> None:
    progress = Progress(stage=3)
    for _ in range(100):
        progress.record(1, loss=0.0, accuracy=1.0)
    assert progress.stage == 3
    assert progress.accuracy[2] == progress.accuracy[3] == 0.0


def test_the_last_stage_does_not_end() -> None:
    last = len(STAGES) - 1
    progress = Progress(stage=last)
    for _ in range(100):
        progress.record(last, loss=0.0, accuracy=1.0)
    assert progress.stage == last


def test_the_hardest_stage_gets_half_until_it_is_solved() -> None:
    progress = Progress(stage=9)
    unsolved = Counter(progress.choose(Random(seed)) for seed in range(2000))
    progress.accuracy[9] = 1.0
    solved = Counter(progress.choose(Random(seed)) for seed in range(2000))
    assert set(unsolved) == set(solved) == set(range(10))
    assert 0.5 < unsolved[9] / 2000 < 0.6
    assert 0.1 < solved[9] / 2000 < 0.25


def test_a_line_shows_the_open_stages() -> None:
    line = str(Progress(step=12, tokens=3_450_000, seconds=90.0, stage=2))
    assert "1.5 min  step     12     3.45 M tokens" in line
    assert "r4:0.0% r16:0.0% 3:0.0%" in line
    assert "6:" not in line.split("3:0.0%")[1]
