"""The settings of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Dataset(StrEnum):
    """The kind of prompts."""

    RANDOM = "random"
    NOTES = "notes"


@dataclass(frozen=True)
class BenchConfig:
    """The load and the prompts of a benchmark; the loop is open with a ``rate``, and closed without one."""

    rate: float | None = None
    concurrency: int = 8
    num_requests: int = 100
    num_warmups: int = 2
    dataset: Dataset = Dataset.RANDOM
    input_len: int = 256
    shared_prefix_len: int = 0
    output_len: int = 64
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shared_prefix_len > self.input_len:
            raise ValueError(
                f"shared-prefix-len ({self.shared_prefix_len}) must be within input-len ({self.input_len})"
            )
