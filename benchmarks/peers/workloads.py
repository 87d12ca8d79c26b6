"""The requests that every side gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from quire.benchmarks.peers.sides.protocol import Dtype, Setup


class Requests(NamedTuple):
    """Prompts, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    max_tokens: list[int]


class Workload(NamedTuple):
    """Requests that are sent together.

    Attributes:
        name: its name on the command line and in the tables.
        num_requests: number of requests.
        prompt_tokens: fewest and most tokens of a prompt, after the shared prefix.
        output_tokens: fewest and most tokens of an answer.
        prefix_tokens: number of tokens with which all prompts begin.
        counts: the tokens whose rate is the result.
    """

    name: str
    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    prefix_tokens: int = 0
    counts: Literal["output", "prompt"] = "output"

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.prefix_tokens + self.prompt_tokens[1] + self.output_tokens[1]

    def requests(self, vocab_size: int, seed: object) -> Requests:
        """Return the requests of one round.

        All rounds have the same lengths. The tokens depend on the workload and on the text of the seed, so no
        round finds another's prompts in a prefix cache.
        """
        lengths, tokens = Random(0), Random(f"{self.name} {seed}")
        prefix = tokens.choices(range(10, vocab_size), k=self.prefix_tokens)
        prompts, max_tokens = [], []
        for _ in range(self.num_requests):
            own = tokens.choices(range(10, vocab_size), k=lengths.randint(*self.prompt_tokens))
            prompts.append(prefix + own)
            max_tokens.append(lengths.randint(*self.output_tokens))
        return Requests(prompts, max_tokens)

    def num_tokens(self, requests: Requests) -> int:
        """Return the number of tokens whose rate is the result."""
        return sum(requests.max_tokens) if self.counts == "output" else sum(map(len, requests.prompts))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mixed", 64, (20, 300), (20, 100)),
        Workload("shared-prefix", 64, (20, 60), (20, 100), prefix_tokens=256),
        Workload("one-stream", 1, (50, 50), (200, 200)),
        Workload("decode", 64, (8, 8), (100, 100)),
        Workload("prefill", 1, (512, 512), (1, 1), counts="prompt"),
    )
}


def setup_for(workloads: Sequence[Workload], model: Path, dtype: Dtype, threads: int) -> Setup:
    """Return what a side must load to run all of the workloads."""
    return Setup(
        str(model),
        dtype,
        threads,
        max_num_seqs=max(workload.num_requests for workload in workloads),
        max_model_len=max(workload.max_model_len for workload in workloads),
    )
