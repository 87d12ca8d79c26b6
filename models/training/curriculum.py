"""The curriculum of training: stages from few notes to many, and the progress through them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple


class Stage(NamedTuple):
    """The size of each conversation in a batch."""

    facts: int
    questions: int
    """Number of questions, or of statements in a recital."""
    recital: bool = False

    @property
    def tokens(self) -> int:
        """Approximate tokens of such a conversation: 8 for a note, 20 for a question with its answer."""
        return 4 * self.questions if self.recital else 8 * self.facts + 20 * self.questions + 8

    def __str__(self) -> str:
        return f"{'r' * self.recital}{self.facts}"


STAGES = (
    Stage(4, 32, recital=True),
    Stage(16, 64, recital=True),
    Stage(3, 6),
    Stage(6, 9),
    Stage(12, 12),
    Stage(20, 20),
    Stage(32, 24),
    Stage(50, 30),
    Stage(75, 36),
    Stage(100, 40),
    Stage(130, 44),
    Stage(180, 60),
    Stage(240, 85),
)
"""The stages in order; the next one opens when the hardest open stage is nearly solved."""

ADVANCE_AT = 0.95
"""Running accuracy of the values at the hardest open stage at which the next stage opens."""


@dataclass
class Progress:
    """The state of a run, without weights and optimizer states.

    Attributes:
        step: number of optimizer steps made.
        tokens: number of tokens that the steps read.
        seconds: time that the steps took.
        stage: index of the hardest open stage.
        accuracy: running share of values predicted right at each stage, given the right tokens before them.
        loss: running mean loss of the values at each stage, in nats.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stage: int = 0
    accuracy: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    loss: list[float] = field(default_factory=lambda: [math.log(900.0)] * len(STAGES))

    def choose(self, rng: Random) -> int:
        """Return the stage of the next batch: half the time the hardest open one, until all are solved."""
        hardest = 0.5 if self.accuracy[self.stage] < ADVANCE_AT else 0.1
        return self.stage if rng.random() < hardest else rng.randint(0, self.stage)

    def record(self, stage: int, loss: float, accuracy: float, keep: float = 0.9) -> None:
        """Record one step at a stage, and open the next stage if the accuracy suffices."""
        self.step += 1
        self.accuracy[stage] = keep * self.accuracy[stage] + (1 - keep) * accuracy
        self.loss[stage] = keep * self.loss[stage] + (1 - keep) * loss
        if stage == self.stage and self.accuracy[stage] >= ADVANCE_AT and stage + 1 < len(STAGES):
            self.stage += 1

    def __str__(self) -> str:
        accuracies = (
            f"{stage}:{accuracy:.1%}"
            for stage, accuracy in zip(STAGES[: self.stage + 1], self.accuracy, strict=False)
        )
        return (
            f"{self.seconds / 60:6.1f} min  step {self.step:6}  {self.tokens / 1e6:7.2f} M tokens"
            f"  loss {self.loss[self.stage]:.4f}  {' '.join(accuracies)}"
        )
