"""Measures speculation: acceptance and output tokens per second, compared with decoding without it.

    python -m quire.benchmarks.speculation
    python -m quire.benchmarks.speculation --model 100m

There are three kinds of text. ``answers`` are the demo model's answers to questions, which repeat a note of
the prompt. In ``recital`` it continues a text that states a few notes repeatedly. In ``random`` any model
continues random tokens, the demo model at temperature 1, others greedily. There are four ways: none, n-grams,
a draft model, and an oracle that knows the answer. The oracle is the ceiling, since all its draft tokens are
right and cost nothing. Each way must give the same tokens. ``none again`` shows how far two measurements of
the same way differ.

The draft model consists of the model's own first layers, since there is no smaller model to download.
A random Llama's first layers would not predict the later ones. The contribution of
the later layers is therefore scaled down until the first layers predict the model about as well as draft
models usually do. Its acceptance is thus artificial, and its times are measured.

The prompts are in the prefix cache, but not in the draft model's. Times are sums over rounds with different
prompts, in which the ways take turns; a round before them compiles kernels. On a shared machine,
``--clock cpu`` with one thread counts processor time instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from shutil import copy, copytree
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from quire.benchmarks.harness.engines import BLOCK_SIZE, CPU, run_to_end
from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import FailedError, Report, program
from quire.benchmarks.harness.random_llamas import SIZES, random_llama
from quire.benchmarks.harness.rounds import show_progress, turns
from quire.benchmarks.harness.tables import table
from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.speculation.draft_proposer import DraftProposer
from quire.engine.speculation.ngram_proposer import NgramProposer
from quire.engine.speculation.speculator import DraftRequest, Proposer, SpeculationCounts, Speculator
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kvindex.block_hash import block_hash
from quire.models import notes
from quire.models.source import demo_model_path
from quire.models.training.conversations import recital
from quire.sampling.params import SamplingParams
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, load_model_files

NUM_BLOCKS = 2048
LIMITS = SchedulerConfig(BLOCK_SIZE, 64, 512)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WAYS = ("none", "none again", "ngram", "draft", "oracle")

Clock = Callable[[], float]
Outputs = list[list[int]]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: Annotated[str, OneOf(("demo", *SIZES))] = "demo"
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch: tuple[int, ...] = (1, 8, 32)
    output_len: int = 128
    num_speculative_tokens: int = 4
    draft_layers: int = 2
    damping: Annotated[float, "factor of what a random Llama's later layers add"] = 0.05
    threads: int = 2
    rounds: int = 3
    clock: Annotated[str, OneOf(CLOCKS)] = "wall"


class Text(NamedTuple):
    """What requests ask for: a prompt for each number, and how to go on."""

    prompt: Callable[[int], list[int]]
    params: dict[str, float | int | bool]


@dataclass(frozen=True)
class RunOutcome:
    """The time of runs, the number of sampled tokens, the tokens themselves, and the draft tokens."""

    seconds: float
    num_tokens: int
    outputs: Outputs
    counts: SpeculationCounts

    def __add__(self, other: RunOutcome) -> RunOutcome:
        """Return both together."""
        (drafted, accepted), (more, right) = self.counts, other.counts
        return RunOutcome(
            self.seconds + other.seconds,
            self.num_tokens + other.num_tokens,
            self.outputs + other.outputs,
            SpeculationCounts(drafted + more, accepted + right),
        )


class Oracle:
    """Proposes exactly the tokens that will follow, which it knows from ``outputs``, one for each request."""

    def __init__(self) -> None:
        self.outputs: Outputs = []

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """See ``Proposer``."""
        return [
            self.outputs[int(sequence.attempt_id)][sequence.num_output_tokens :][:num_tokens]
            for sequence, num_tokens in requests
        ]


def make_texts(folder: str, vocab_size: int, num_tokens: int, *, is_demo: bool) -> dict[str, Text]:
    """Return the kinds of text that a model can go on with."""

    def random(index: int) -> list[int]:
        return Random(index).choices(range(10, vocab_size), k=128)

    endless = {"max_tokens": num_tokens, "ignore_eos": True}
    if not is_demo:
        return {"random": Text(random, {"temperature": 0.0, **endless})}
    files = load_model_files(folder)
    tokenizer, template = Tokenizer.load(files.folder), ChatTemplate.load(files)
    assert template is not None

    def question(index: int) -> list[int]:
        [example] = notes.held_out(1, 30, seed=index)
        text = template.render(example.messages)
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def statements(index: int) -> list[int]:
        text = " ".join(statement for statement, _ in recital(Random(index), 4, 12, terse=False))
        return tokenizer.encode_batch([text])[0]

    return {
        "answers": Text(question, {"temperature": 0.0, "max_tokens": 32}),
        "recital": Text(statements, {"temperature": 0.0, **endless}),
        "random": Text(random, {"temperature": 1.0, **endless}),
    }


def damp_later_layers(folder: str, num_layers: int, factor: float) -> None:
    """Scale what a saved model's layers add after the first ``num_layers``."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers[num_layers:]:
        for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output.weight.data *= factor
    model.save_pretrained(folder)


def make_draft(folder: str, num_layers: int, target: Path, dtype: str) -> LoadedModel:
    """Save a model's first layers, under its own embeddings and head, and load them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    model.save_pretrained(target)
    for name in ("generation_config.json", "tokenizer.json"):
        if (Path(folder) / name).exists():
            copy(Path(folder) / name, target)
    return load_model(str(target), dtype, CPU)


class Bench:
    """Runs one model in every way.

    Args:
        num_guesses: most draft tokens for a sequence in a step.
    """

    def __init__(self, model: LoadedModel, draft: LoadedModel, num_guesses: int, clock: Clock) -> None:
        self._model, self._draft, self._num_guesses, self._clock = model, draft, num_guesses, clock
        self._memory = KvMemory(model.kv_shape(BLOCK_SIZE), NUM_BLOCKS, CPU)
        self._draft_memory = KvMemory(draft.kv_shape(BLOCK_SIZE), NUM_BLOCKS, CPU)

    def measure(self, text: Text, batch: int, num_rounds: int) -> dict[str, RunOutcome]:
        """Return each way's outcome over all rounds except the first; all ways must sample the same tokens.

        Raises:
            FailedError: a way sampled different tokens.
        """
        oracle = Oracle()
        speculators = {way: self._speculator(way, oracle) for way in WAYS}
        totals: dict[str, RunOutcome] = {}
        expected: dict[int, Outputs] = {}
        for number, way in turns(WAYS, num_rounds):
            prompts = [text.prompt((number + 1) * batch + index) for index in range(batch)]
            if number not in expected:
                expected[number] = self._run(text, prompts, None).outputs
            oracle.outputs = expected[number]
            outcome = self._run(text, prompts, speculators[way])
            if outcome.outputs != expected[number]:
                raise FailedError(f"speculation by {way} changed the tokens")
            if number >= 0:
                totals[way] = outcome + totals[way] if way in totals else outcome
        return totals

    def _speculator(self, way: str, oracle: Oracle) -> Speculator | None:
        if way.startswith("none"):
            return None
        proposer: Proposer = NgramProposer()
        if way == "draft":
            eos_token_ids = self._model.eos_token_ids
            proposer = DraftProposer(self._draft, self._draft_memory, LIMITS, block_hash, eos_token_ids)
        elif way == "oracle":
            proposer = oracle
        return Speculator(proposer, self._num_guesses)

    def _run(self, text: Text, prompts: list[list[int]], speculator: Speculator | None) -> RunOutcome:
        parts = EngineParts(speculator=speculator, clock=self._clock)
        engine = Engine(self._model, self._memory, LIMITS, block_hash, parts=parts)
        self._cache(engine, prompts)
        sequences = []
        before = speculator.counts if speculator else SpeculationCounts(0, 0)
        for index, prompt in enumerate(prompts):
            params = SamplingParams(seed=index, **text.params)  # type: ignore[arg-type]
            sequences.append(Sequence(str(index), prompt[:], len(prompt), params, b""))
            engine.add_request(sequences[-1])
        begin = self._clock()
        while not engine.is_idle:
            engine.step()
        seconds = self._clock() - begin
        outputs = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
        drafted, accepted = speculator.counts if speculator else before
        counts = SpeculationCounts(drafted - before.drafted, accepted - before.accepted)
        return RunOutcome(seconds, sum(map(len, outputs)), outputs, counts)

    def _cache(self, engine: Engine, prompts: list[list[int]]) -> None:
        """Fill the prefix cache, so that only decoding is timed."""
        params = SamplingParams(max_tokens=1)
        for index, prompt in enumerate(prompts):
            engine.add_request(Sequence(f"cache-{index}", prompt[:], len(prompt), params, b""))
        run_to_end(engine, ())


def rows_of(outcomes: dict[str, RunOutcome], num_guesses: int) -> list[dict[str, Any]]:
    """Return the figures of each way."""
    return [
        {
            "way": way,
            "tok_s": outcome.num_tokens / outcome.seconds,
            "speed_up": outcomes["none"].seconds / outcome.seconds,
            **outcome.counts._asdict(),
            "acceptance": outcome.counts.accepted / outcome.counts.drafted
            if outcome.counts.drafted
            else None,
            "guessed_share": outcome.counts.accepted / outcome.num_tokens,
            "ceiling": num_guesses + 1,
        }
        for way, outcome in sorted(outcomes.items(), key=lambda item: WAYS.index(item[0]))
    ]


@program
def main(options: Options) -> Report:
    """Measure every text with every batch."""
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    return Report([_table(options, rows)], {"rows": rows})


def measure(options: Options, folder: Path) -> list[dict[str, Any]]:
    """Return a row for every text, batch and way."""
    is_demo = options.model == "demo"
    path = str(demo_model_path())
    if not is_demo:
        path = str(copytree(random_llama(options.model), folder / "model"))
        damp_later_layers(path, options.draft_layers, options.damping)
    model = load_model(path, options.dtype, CPU)
    draft = make_draft(path, options.draft_layers, folder / "draft", options.dtype)
    bench = Bench(model, draft, options.num_speculative_tokens, CLOCKS[options.clock])
    texts = make_texts(path, model.vocab_size, options.output_len, is_demo=is_demo)
    rows: list[dict[str, Any]] = []
    for batch, (name, text) in product(options.batch, texts.items()):
        show_progress(f"{name}, batch {batch}")
        outcomes = bench.measure(text, batch, options.rounds)
        rows += [
            {"text": name, "batch": batch, **row} for row in rows_of(outcomes, options.num_speculative_tokens)
        ]
    return rows


def _table(options: Options, rows: list[dict[str, Any]]) -> Table:
    columns = {
        "text": "{text}",
        "batch": "{batch}",
        "way": "{way}",
        "tok/s": "{tok_s:.0f}",
        "speed-up": "{speed_up:.2f}",
        "ceiling": "{ceiling}",
        "acceptance": "{acceptance:.0%}",
        "accepted tokens": "{guessed_share:.0%}",
    }
    return table(f"{options.model}, {options.dtype}, {options.threads} threads", rows, columns)


if __name__ == "__main__":
    main()
