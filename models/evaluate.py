"""Measure how often the demo model answers exactly right on notes that training never saw.

    python -m quire.models.evaluate

Every answer is decoded greedily by transformers from the chat template's text, and counts as right only if all of
it is. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from quire.models.notes import Example, held_out

DEMO = Path(__file__).parent / "demo"
"""Folder of the bundled checkpoint."""


@dataclass(frozen=True, slots=True)
class Result:
    """Accuracy on one kind of example.

    Attributes:
        dtype: of weights and arithmetic.
        facts: notes in each example.
        turns: questions in each conversation; the last is the one counted.
        tokens: mean length of the prompts.
        examples: how many.
        right: how many answers were exactly right.
    """

    dtype: str
    facts: int
    turns: int
    tokens: float
    examples: int
    right: int

    @property
    def accuracy(self) -> float:
        """Share of exactly right answers."""
        return self.right / self.examples


def load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the checkpoint and its tokenizer, which pads at the left as generation needs."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), tokenizer


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], batch: int = 16
) -> list[str]:
    """Answer the last question of each example greedily."""
    found: list[str] = []
    for some in (examples[start : start + batch] for start in range(0, len(examples), batch)):
        inputs = tokenizer.apply_chat_template(
            [example.messages for example in some],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            outputs = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        found += tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], facts: int
) -> Result:
    """Count the exactly right answers."""
    found = answers(model, tokenizer, examples)
    prompts = tokenizer.apply_chat_template(
        [example.messages for example in examples], add_generation_prompt=True, return_dict=True
    )
    return Result(
        dtype=str(model.dtype).removeprefix("torch."),
        facts=facts,
        turns=sum(message["role"] == "user" for message in examples[0].messages),
        tokens=statistics.mean(map(len, prompts["input_ids"])),
        examples=len(examples),
        right=sum(got == example.expected for got, example in zip(found, examples, strict=True)),
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the checkpoint")
    parser.add_argument("--examples", type=int, default=200, help="examples for each line of the table")
    parser.add_argument("--facts", type=int, nargs="+", default=[5, 20, 50, 75, 100, 125, 150])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8], help="questions in each conversation")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0, help="another one gives other held-out examples")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    results = []
    print(f"{'dtype':<10}{'facts':>6}{'turns':>6}{'tokens':>8}{'right':>12}{'accuracy':>10}{'seconds':>9}")
    for dtype in arguments.dtypes:
        model, tokenizer = load(arguments.model, getattr(torch, dtype))
        for turns in arguments.turns:
            for facts in arguments.facts:
                started = time.perf_counter()
                examples = held_out(arguments.examples, facts, arguments.seed, turns)
                result = measure(model, tokenizer, examples, facts)
                results.append(result)
                print(
                    f"{dtype:<10}{facts:>6}{turns:>6}{result.tokens:>8.0f}"
                    f"{f'{result.right}/{result.examples}':>12}{result.accuracy:>10.1%}"
                    f"{time.perf_counter() - started:>9.1f}",
                    flush=True,
                )
    print(json.dumps([{**asdict(result), "accuracy": result.accuracy} for result in results]))


if __name__ == "__main__":
    main()
