"""One stream on the CPU by the type of the weights: speed, and for the demo model how much is lost.

    python -m quire.benchmarks.weight_dtypes [--model FOLDER] [--threads 2]

A step with one token reads every weight of the linear layers once. Bytes per second are those weights by the
time of the forward pass. The types take turns, and each has the median of its rounds. The demo model also
answers questions that training never saw, and its cross-entropy is that of such conversations. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
from statistics import mean, median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from quire.benchmarks.decode_steps import StepTime, time_steps
from quire.engine.config import Dtype, WeightDtype
from quire.engine.model.packed_linear import PackedLinear
from quire.llm import LLM, SamplingParams
from quire.models.notes import held_out

CONTEXT = 128
NUM_FACTS = 20
NUM_TURNS = 4


class Kind(NamedTuple):
    """The dtype of a model, and the type of its weights."""

    dtype: Dtype
    weight_dtype: WeightDtype

    def __str__(self) -> str:
        return self.dtype if self.weight_dtype == "auto" else f"{self.dtype} with {self.weight_dtype}"


KINDS = (
    Kind("float32", "auto"),
    Kind("bfloat16", "auto"),
    Kind("float32", "int8"),
    Kind("float32", "int4"),
)


class Quality(NamedTuple):
    """Answers that are exactly right, and nats per token of conversations."""

    num_right: int
    cross_entropy: float


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of the packed weights of all linear layers, with their scales."""
    modules = llm.engine.model.module.modules()
    return sum(each.packed.panels.nbytes for each in modules if isinstance(each, PackedLinear))


def measure_speed(llms: dict[Kind, LLM], num_rounds: int) -> dict[Kind, StepTime]:
    """Return the median times of a step with one token."""
    times: dict[Kind, list[StepTime]] = {kind: [] for kind in llms}
    for _ in range(num_rounds):
        for kind, llm in llms.items():
            times[kind].append(time_steps(llm.engine, 1, CONTEXT))
    return {
        kind: StepTime(median(each.forward for each in found), median(each.step for each in found))
        for kind, found in times.items()
    }


def measure_quality(llm: LLM, num_examples: int) -> Quality:
    """Let the demo model answer, and score conversations that contain the right answers."""
    asked = held_out(num_examples, NUM_FACTS)
    answers = llm.chat(
        [list(each.messages) for each in asked],
        SamplingParams(temperature=0.0, max_tokens=16),
        use_tqdm=False,
    )
    scored = llm.chat(
        [list(each.messages) for each in held_out(num_examples, NUM_FACTS, num_turns=NUM_TURNS)],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    logprobs = [
        tokens[token_id].logprob
        for output in scored
        for token_id, tokens in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        if tokens is not None
    ]
    num_right = sum(
        output.outputs[0].text == each.expected for output, each in zip(answers, asked, strict=True)
    )
    return Quality(num_right, -mean(logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; by default the demo model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--examples", type=int, default=200, help="questions and conversations")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llms = {
        kind: LLM(
            arguments.model, device="cpu", dtype=kind.dtype, weight_dtype=kind.weight_dtype, num_blocks=1024
        )
        for kind in KINDS
    }
    times = measure_speed(llms, arguments.rounds)
    table = Table("weights", "MB", "ms", "GB/s", "tokens/s", "right", "nats per token")
    rows = []
    for kind, llm in llms.items():
        quality = None if arguments.model else measure_quality(llm, arguments.examples)
        num_bytes, seconds = weight_bytes(llm), times[kind]
        table.add_row(
            str(kind),
            f"{num_bytes / 1e6:.1f}",
            f"{seconds.step * 1e3:.3f}",
            f"{num_bytes / seconds.forward / 1e9:.1f}",
            f"{1 / seconds.step:.0f}",
            "" if quality is None else f"{quality.num_right} of {arguments.examples}",
            "" if quality is None else f"{quality.cross_entropy:.4f}",
        )
        rows.append(
            {
                **kind._asdict(),
                "weight_bytes": num_bytes,
                **seconds._asdict(),
                **({} if quality is None else quality._asdict()),
            }
        )
    Console().print(table)
    print(json.dumps({"benchmark": "weight_dtypes", **vars(arguments), "rows": rows}))


if __name__ == "__main__":
    main()
