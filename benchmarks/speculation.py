"""Measures speculation: acceptance and output tokens per second, compared with decoding without it.

    python -m quire.benchmarks.speculation
    python -m quire.benchmarks.speculation --model random-100m

There are three kinds of text. ``answers`` are the demo model's answers to questions, which repeat a note of
the prompt. In ``recital`` it continues a text that states a few notes repeatedly. In ``random`` any model
continues random tokens, the demo model at temperature 1, others greedily. There are four ways: none, n-grams,
a draft model, and an oracle that knows the answer. The oracle is the ceiling, since all its draft tokens are
right and cost nothing. Each way must give the same tokens. ``none again`` shows how far two measurements of
the same way differ. The last line is JSON.

The draft model consists of the model's own first layers, since there is no smaller model to download.
``random-100m`` has random weights, whose first layers would not predict the later ones. The contribution of
the later layers is therefore scaled down until the first layers predict the model about as well as draft
models usually do. Its acceptance is thus artificial, and its times are measured.

The prompts are in the prefix cache, but not in the draft model's. Times are sums over rounds with different
prompts, in which the ways take turns; a round before them compiles kernels. On a shared machine,
``--clock cpu`` with one thread counts processor time instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from shutil import copy
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from quire.benchmarks.engine_against_transformers import make_100m_model
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

BLOCK_SIZE, NUM_BLOCKS = 16, 2048
LIMITS = SchedulerConfig(BLOCK_SIZE, 64, 512)
CPU = torch.device("cpu")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WAYS = ("none", "none again", "ngram", "draft", "oracle")

Clock = Callable[[], float]
Outputs = list[list[int]]


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
            RuntimeError: a way sampled different tokens.
        """
        oracle = Oracle()
        speculators = {way: self._speculator(way, oracle) for way in WAYS}
        totals: dict[str, RunOutcome] = {}
        for number in range(num_rounds + 1):
            prompts = [text.prompt(number * batch + index) for index in range(batch)]
            expected = oracle.outputs = self._run(text, prompts, None).outputs
            for way, speculator in speculators.items():
                outcome = self._run(text, prompts, speculator)
                if outcome.outputs != expected:
                    raise RuntimeError(f"guessing by {way} changed the tokens")
                if number:
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
        while not engine.is_idle:
            engine.step()


def rows_of(outcomes: dict[str, RunOutcome], num_guesses: int) -> list[dict[str, object]]:
    """Return the figures of each way."""
    rows = []
    for way, outcome in outcomes.items():
        seconds, num_tokens, (drafted, accepted) = outcome.seconds, outcome.num_tokens, outcome.counts
        rows.append(
            {
                "way": way,
                "tok_s": num_tokens / seconds,
                "speed_up": outcomes["none"].seconds / seconds,
                "drafted": drafted,
                "accepted": accepted,
                "acceptance": accepted / drafted if drafted else None,
                "guessed_share": accepted / num_tokens,
                "ceiling": num_guesses + 1,
            }
        )
    return rows


def main() -> None:
    """Run all and print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="demo, random-100m or a folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--damping", type=float, default=0.05, help="of random-100m's later layers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with TemporaryDirectory() as folder:
        results = measure(arguments, Path(folder))
    print(json.dumps({"bench": "speculation", **vars(arguments), "results": results}))


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Measure every text with every batch, and print the table as it grows."""
    is_demo = arguments.model == "demo"
    path = str(demo_model_path()) if is_demo else arguments.model
    if path == "random-100m":
        path = make_100m_model(str(folder / "model"))
        damp_later_layers(path, arguments.draft_layers, arguments.damping)
    model = load_model(path, arguments.dtype, CPU)
    draft = make_draft(path, arguments.draft_layers, folder / "draft", arguments.dtype)
    bench = Bench(model, draft, arguments.num_speculative_tokens, CLOCKS[arguments.clock])
    texts = make_texts(path, model.vocab_size, arguments.output_len, is_demo=is_demo)
    results: list[dict[str, object]] = []
    console = Console(width=110)
    for batch in arguments.batch:
        for name, text in texts.items():
            table = Table("way", "tok/s", "speed-up", "acceptance", "guessed tokens")
            table.title = f"{arguments.model} {arguments.dtype}, {name}, batch {batch}"
            rows = rows_of(bench.measure(text, batch, arguments.rounds), arguments.num_speculative_tokens)
            for row in rows:
                acceptance = row["acceptance"]
                table.add_row(
                    str(row["way"]),
                    f"{row['tok_s']:.0f}",
                    f"{row['speed_up']:.2f}",
                    "" if acceptance is None else f"{acceptance:.0%}",
                    f"{row['guessed_share']:.0%}",
                )
                results.append({"text": name, "batch": batch, **row})
            console.print(table)
    return results


if __name__ == "__main__":
    main()
