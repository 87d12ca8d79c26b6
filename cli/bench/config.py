"""The settings of a benchmark, and their options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer


class Dataset(StrEnum):
    """The kind of prompts."""

    RANDOM = "random"
    NOTES = "notes"


def _load(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Load", **more)


def _prompts(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Prompts", **more)


@dataclass(frozen=True)
class BenchConfig:
    """The load and the prompts of a benchmark; the loop is open with a ``rate``, and closed without one.

    Raises:
        ValueError: settings contradict each other.
    """

    rate: Annotated[
        float | None, _load("--rate", "Open loop: this many requests a second, Poisson arrivals.", min=0.001)
    ] = None
    concurrency: Annotated[
        int, _load("--concurrency", "Closed loop: this many requests under way; unused with --rate.", min=1)
    ] = 8
    num_requests: Annotated[int, _load("--num-requests", "Requests to measure.", min=1)] = 100
    num_warmups: Annotated[int, _load("--num-warmups", "Unmeasured requests to send first.", min=0)] = 2
    dataset: Annotated[
        Dataset, _prompts("--dataset", "Random token ids, or the bundled demo's questions about notes.")
    ] = Dataset.RANDOM
    input_len: Annotated[int, _prompts("--input-len", "Tokens of a prompt; of notes, about.", min=1)] = 256
    shared_prefix_len: Annotated[
        int, _prompts("--shared-prefix-len", "Tokens with which all random prompts begin.", min=0)
    ] = 0
    output_len: Annotated[int, _prompts("--output-len", "Most tokens to generate.", min=1)] = 64
    ignore_eos: Annotated[
        bool, _prompts("--ignore-eos", "Always generate that many, whatever the model says.")
    ] = False
    temperature: Annotated[float, _prompts("--temperature", "0 is greedy.")] = 0.0
    seed: Annotated[int, _prompts("--seed", "Same seed, same prompts and arrivals.")] = 0

    def __post_init__(self) -> None:
        if self.shared_prefix_len > self.input_len:
            raise ValueError(
                f"shared-prefix-len ({self.shared_prefix_len}) must be within input-len ({self.input_len})"
            )
