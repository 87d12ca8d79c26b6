"""The settings of a benchmark, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Dataset(StrEnum):
    """The kind of prompts."""

    RANDOM = "random"
    NOTES = "notes"
    SHAREGPT = "sharegpt"
    MOONCAKE = "mooncake"
    BURSTGPT = "burstgpt"
    AGENTS = "agents"

    @property
    def is_file(self) -> bool:
        """Whether the requests come from a file."""
        return self in (Dataset.SHAREGPT, Dataset.MOONCAKE, Dataset.BURSTGPT)


LATENCIES = ("ttft", "tpot", "e2el")
TIMED = (Dataset.MOONCAKE, Dataset.BURSTGPT, Dataset.AGENTS)


def _load(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Load", **more)


def _prompts(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Prompts", **more)


@dataclass(frozen=True)
class BenchConfig:
    """The load and the prompts of a benchmark.

    The loop is open with a ``rate``, or a ``trace_speed`` and a trace that has times; otherwise it is closed.

    Raises:
        ValueError: settings contradict each other.
    """

    rate: Annotated[
        float | None,
        _load("--rate", "Open loop: this many requests a second, Poisson arrivals.", min=0.001, max=1e6),
    ] = None
    concurrency: Annotated[
        int, _load("--concurrency", "Closed loop: this many requests under way; unused with --rate.", min=1)
    ] = 8
    trace_speed: Annotated[
        float | None,
        _load(
            "--trace-speed", "Open loop at the trace's times, this many times as fast.", min=0.001, max=1e6
        ),
    ] = None
    rounds: Annotated[
        int, _load("--rounds", "Parts of the requests by which --compare takes turns.", min=1)
    ] = 5
    goodput: Annotated[
        list[str] | None,
        _load("--goodput", "Limit in ms that good requests keep, as ttft:500; of ttft, tpot or e2el."),
    ] = None
    num_requests: Annotated[int, _load("--num-requests", "Requests to measure.", min=1)] = 100
    num_warmups: Annotated[int, _load("--num-warmups", "Unmeasured requests to send first.", min=0)] = 2
    dataset: Annotated[
        Dataset,
        _prompts(
            "--dataset",
            "Random token ids, the bundled demo's questions about notes, a file in the form of ShareGPT, "
            "Mooncake or BurstGPT, or sessions of agents.",
        ),
    ] = Dataset.RANDOM
    dataset_path: Annotated[
        Path | None,
        _prompts(
            "--dataset-path",
            "File of the dataset; requests that exceed the model's length are left out.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    input_len: Annotated[
        int, _prompts("--input-len", "Tokens of a prompt; approximate for notes.", min=1)
    ] = 256
    shared_prefix_len: Annotated[
        int, _prompts("--shared-prefix-len", "Tokens with which all random prompts begin.", min=0)
    ] = 0
    output_len: Annotated[
        int, _prompts("--output-len", "Most tokens to generate; files have their own.", min=1)
    ] = 64
    ignore_eos: Annotated[
        bool, _prompts("--ignore-eos", "Always generate that many, whatever the model says.")
    ] = False
    temperature: Annotated[float, _prompts("--temperature", "0 is greedy.")] = 0.0
    seed: Annotated[
        int, _prompts("--seed", "Same seed, same prompts and arrivals; a second run finds prompts cached.")
    ] = 0

    def __post_init__(self) -> None:
        if self.dataset.is_file and self.dataset_path is None:
            raise ValueError(f"{self.dataset} needs --dataset-path")
        if not self.dataset.is_file and self.dataset_path is not None:
            raise ValueError(f"--dataset-path goes with sharegpt, mooncake and burstgpt, not {self.dataset}")
        if self.trace_speed is not None and self.dataset not in TIMED:
            raise ValueError(f"--trace-speed needs a dataset with times: {', '.join(TIMED)}")
        if self.trace_speed is not None and self.rate is not None and self.dataset is not Dataset.AGENTS:
            raise ValueError("--rate and --trace-speed both say when to send: give one of them")
        if not self.limits_ms.keys() <= {*LATENCIES}:
            raise ValueError(f"goodput limits are of {', '.join(LATENCIES)}; got {', '.join(self.limits_ms)}")
        if not all(limit > 0 for limit in self.limits_ms.values()):
            raise ValueError(f"goodput limits must be above 0; got {' '.join(self.goodput or [])}")
        if self.shared_prefix_len > self.input_len:
            raise ValueError(
                f"--shared-prefix-len ({self.shared_prefix_len}) is more than --input-len ({self.input_len})"
            )

    @property
    def limits_ms(self) -> Mapping[str, float]:
        """The limits of good requests by latency."""
        limits = self.goodput or []
        try:
            return {name: float(limit) for name, limit in (each.split(":") for each in limits)}
        except ValueError as error:
            raise ValueError(f"goodput must look like ttft:500; got {' '.join(limits)}") from error
