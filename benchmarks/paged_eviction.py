"""What a KV budget costs: memory of a request against right answers, with blocks evicted in two ways.

    python -m quire.benchmarks.paged_eviction

The demo model answers a question about one of the notes in its prompt of about 1,000 tokens, and is right
only if the whole answer is. Once the prompt is computed, its blocks are given back down to the budget: those
that matter least by PagedEviction's measure, or the oldest ones, which leaves a window of recent tokens. The
last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from rich.console import Console

from quire.benchmarks.paper.demo import CPU, as_sequence, load_demo
from quire.benchmarks.paper.report import Result, progress, save, show
from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.paged_eviction import PagedEviction, Score, importance
from quire.engine.weights.loader import LoadedModel
from quire.kvindex.block_hash import block_hash
from quire.models.notes import held_out
from quire.models.source import demo_model_path
from quire.sampling.params import SamplingParams
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, load_model_files

BLOCK_SIZE = 16
BATCH = 8
"""Examples at a time: their prompts stay in the prefix cache for the next budget."""
NUM_FACTS = 120
BUDGETS = (768, 512, 256, 128, 64)
RESULTS = Path(__file__).parent / "results"


def recency(memory: KvMemory, block_ids: list[int]) -> list[float]:
    """Return a score for each block that increases with its position."""
    return list(map(float, range(len(block_ids))))


METHODS: Mapping[str, Score] = {"PagedEviction": importance, "recency window": recency}


class Example(NamedTuple):
    """A prompt and the only right answer to it."""

    token_ids: list[int]
    expected: str


@dataclass(slots=True)
class Measured:
    """The results of one method at one budget.

    Attributes:
        method: how the blocks to evict were chosen.
        budget: most KV tokens of a request; None keeps all.
        right: number of answers that were exactly right.
        held_bytes: bytes of a request's blocks, at each step of its decoding.
    """

    method: str
    budget: int | None
    right: int = 0
    held_bytes: list[int] = field(default_factory=list)

    @property
    def kib(self) -> float:
        """Mean KV memory of a request while it decodes."""
        return statistics.mean(self.held_bytes) / 1024


def make_examples(tokenizer: Tokenizer, num: int) -> list[Example]:
    """Write prompts about notes that training never saw."""
    template = ChatTemplate.load(load_model_files(str(demo_model_path())))
    assert template is not None
    examples = held_out(num, NUM_FACTS)
    texts = [template.render(example.messages) for example in examples]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [Example(ids, example.expected) for ids, example in zip(encoded, examples, strict=True)]


def make_engine(model: LoadedModel, score: Score) -> Engine:
    """Return an engine that evicts by a score."""
    memory = KvMemory(model.kv_shape(BLOCK_SIZE), 2048, CPU)
    limits = SchedulerConfig(BLOCK_SIZE)
    return Engine(model, memory, limits, block_hash, parts=EngineParts(eviction=PagedEviction(memory, score)))


def answer(engine: Engine, tokenizer: Tokenizer, examples: Sequence[Example], into: Measured) -> None:
    """Answer some examples and count; prompts that the engine has seen come from its prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=24, kv_budget_tokens=into.budget)
    requests = [as_sequence(index, each.token_ids, params, b"") for index, each in enumerate(examples)]
    for request in requests:
        engine.add_request(request)
    while not engine.is_idle:
        engine.step()
        decoding = (s for s in requests if s.num_output_tokens and s.block_table)
        into.held_bytes += [len(s.held_blocks) * engine.memory.shape.block_bytes for s in decoding]
    engine.check_conservation()
    for request, example in zip(requests, examples, strict=True):
        output = request.token_ids[request.num_prompt_tokens :]
        into.right += tokenizer.decode(output, skip_special_tokens=True) == example.expected


def run(num_examples: int) -> Result:
    """Measure the full cache and each method at each budget."""
    model, tokenizer = load_demo(), Tokenizer.load(load_model_files(str(demo_model_path())).folder)
    examples = make_examples(tokenizer, num_examples)
    engines = {method: make_engine(model, score) for method, score in METHODS.items()}
    full, *others = found = [Measured("full cache", None)] + [
        Measured(method, budget) for budget in BUDGETS for method in METHODS
    ]
    for start in progress(range(0, num_examples, BATCH), "examples"):
        batch = examples[start : start + BATCH]
        answer(next(iter(engines.values())), tokenizer, batch, full)
        for each in others:
            answer(engines[each.method], tokenizer, batch, each)
    rows = [
        (
            each.method,
            str(each.budget or "all"),
            f"{each.kib:.0f}",
            f"{100 * each.kib / full.kib:.0f} %",
            f"{each.right}/{num_examples}",
            f"{100 * each.right / num_examples:.0f} %",
        )
        for each in found
    ]
    num_tokens = statistics.mean(len(example.token_ids) for example in examples)
    return Result(
        "paged_eviction",
        "Right answers within a KV budget",
        ("blocks kept", "budget, tokens", "KiB", "of the full cache", "right", "accuracy"),
        rows,
        f"{NUM_FACTS} notes, prompts of {num_tokens:.0f} tokens in the mean, blocks of {BLOCK_SIZE}, float32",
        lambda axes: _draw(axes, found, num_examples),
        {
            "num_examples": num_examples,
            "prompt_tokens": num_tokens,
            "measured": [
                {"method": e.method, "budget": e.budget, "right": e.right, "kib": e.kib} for e in found
            ],
        },
    )


def _draw(axes: Axes, found: Sequence[Measured], num_examples: int) -> None:
    full = found[0]
    for method in METHODS:
        points = [each for each in found if each.method in (method, full.method)]
        axes.plot(
            [each.kib for each in points],
            [100 * each.right / num_examples for each in points],
            "o-",
            label=method,
        )
    axes.set_xlabel("KV memory of a request while it decodes, KiB")
    axes.set_ylabel("right answers, %")
    axes.set_ylim(0, 105)
    axes.legend()


def main() -> None:
    """Measure, print a table and the result as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=200, help="questions for each line of the table")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for picture and numbers")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    result = run(arguments.examples)
    show(result, Console())
    save(result, arguments.output)
    print(json.dumps(result.raw))


if __name__ == "__main__":
    main()
