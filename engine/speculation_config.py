"""Whether and how a worker proposes draft tokens; importing this does not load torch."""

from __future__ import annotations

from dataclasses import dataclass

SPECULATIONS = ("off", "ngram", "draft")

MAX_SPECULATIVE_TOKENS = 16
"""Most draft tokens per step: all of them are computed, and the later ones are seldom right."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How to propose draft tokens.

    Attributes:
        kind: "off" proposes none, "ngram" looks for the last tokens earlier in the sequence, "draft" runs a
            smaller model.
        num_tokens: most draft tokens for one sequence in one step.
        draft_model: folder or hub id of the smaller model.

    Raises:
        ValueError: settings are out of range or contradict each other.
    """

    kind: str = "off"
    num_tokens: int = 4
    draft_model: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in SPECULATIONS:
            raise ValueError(f"speculation must be one of {SPECULATIONS}, got {self.kind!r}")
        if not 1 <= self.num_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, got {self.num_tokens}"
            )
        if (self.kind == "draft") != (self.draft_model is not None):
            raise ValueError("speculation 'draft' and a draft_model go together: give both or neither")
