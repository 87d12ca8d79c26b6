"""Measure how often the demo model answers exactly right on notes that training never saw.

    python -m quire.models.training.evaluate
    python -m quire.models.training.evaluate --forms --facts 20 125 --dtypes bfloat16

Each answer is decoded greedily by transformers from the chat template's text, and counts as right only if all
its tokens are right. The margin of an answer is the smallest distance, over its tokens, between the best and
the second-best logit. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from quire.models.notes import QUESTIONS, Example, held_out
from quire.models.source import demo_model_path
from quire.models.training.forms import FORMS, held_out_form


@dataclass(frozen=True, slots=True)
class Result:
    """Accuracy on one kind of example.

    Attributes:
        form: how notes and questions are given.
        dtype: the type of weights and arithmetic.
        facts: number of notes in each example.
        turns: number of questions in each conversation; only the last answer counts.
        tokens: mean length of the prompts.
        examples: number of examples.
        right: number of answers that were exactly right.
        margin: the margin that 19 of 20 answers exceed.
    """

    form: str
    dtype: str
    facts: int
    turns: int
    tokens: float
    examples: int
    right: int
    margin: float

    @property
    def accuracy(self) -> float:
        """Share of exactly right answers."""
        return self.right / self.examples


def load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the checkpoint and its tokenizer, which pads on the left as generation requires."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), tokenizer


class ScoredAnswer(NamedTuple):
    """The model's answer and its margin in nats."""

    text: str
    margin: float


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], batch: int = 16
) -> list[ScoredAnswer]:
    """Return the greedy answer to the last question of each example."""
    found: list[ScoredAnswer] = []
    for start in range(0, len(examples), batch):
        inputs = tokenizer.apply_chat_template(
            [example.messages for example in examples[start : start + batch]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            outputs = model.generate(
                **inputs, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        said = outputs.sequences[:, inputs["input_ids"].shape[1] :]
        best = torch.stack(outputs.logits, dim=1).float().topk(2).values
        margins = (best[..., 0] - best[..., 1]).masked_fill(said == tokenizer.pad_token_id, torch.inf).amin(1)
        texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        found += map(ScoredAnswer, texts, margins.tolist())
    return found


class Case(NamedTuple):
    """The examples of one line of the table: of one form, with the same number of notes."""

    form: str
    facts: int
    examples: list[Example]


def plain_cases(num: int, facts: Sequence[int], turns: Sequence[int], seed: int) -> list[Case]:
    """Make examples of the simplest form, with the given numbers of notes and of questions."""
    form = QUESTIONS[0].format(attribute="code", item="lantern")
    return [Case(form, count, held_out(num, count, seed, asked)) for asked in turns for count in facts]


def form_cases(num: int, facts: Sequence[int], seed: int) -> list[Case]:
    """Make examples of every form."""
    return [
        Case(name, count, held_out_form(form, num, count, seed))
        for count in facts
        for name, form in FORMS.items()
    ]


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, case: Case) -> Result:
    """Answer the examples of a case and count the exactly right answers."""
    examples = case.examples
    found = answers(model, tokenizer, examples)
    prompts = tokenizer.apply_chat_template(
        [example.messages for example in examples], add_generation_prompt=True, return_dict=True
    )
    return Result(
        form=case.form,
        dtype=str(model.dtype).removeprefix("torch."),
        facts=case.facts,
        turns=sum(message["role"] == "user" for message in examples[0].messages),
        tokens=statistics.mean(map(len, prompts["input_ids"])),
        examples=len(examples),
        right=sum(got.text == example.expected for got, example in zip(found, examples, strict=True)),
        margin=sorted(got.margin for got in found)[len(found) // 20],
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="folder of the checkpoint")
    parser.add_argument("--examples", type=int, default=300, help="examples for each line of the table")
    parser.add_argument("--facts", type=int, nargs="+", default=[5, 20, 50, 100, 125, 240])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8], help="questions in each conversation")
    parser.add_argument(
        "--forms", action="store_true", help="measure every form of notes and questions, not turns"
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0, help="another one gives other held-out examples")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    return parser.parse_args()


def main() -> None:
    """Measure and print a table."""
    arguments = parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    num, facts, seed = arguments.examples, arguments.facts, arguments.seed
    cases = (
        form_cases(num, facts, seed) if arguments.forms else plain_cases(num, facts, arguments.turns, seed)
    )
    results = []
    print(
        f"{'form':<46}{'dtype':<10}{'facts':>6}{'turns':>6}{'tokens':>8}{'right':>10}{'accuracy':>10}{'margin':>8}"
    )
    for dtype in arguments.dtypes:
        model, tokenizer = load(arguments.model, getattr(torch, dtype))
        for case in cases:
            result = measure(model, tokenizer, case)
            results.append(result)
            print(
                f"{result.form:<46}{dtype:<10}{result.facts:>6}{result.turns:>6}{result.tokens:>8.0f}"
                f"{f'{result.right}/{result.examples}':>10}{result.accuracy:>10.1%}{result.margin:>8.1f}",
                flush=True,
            )
    print(json.dumps([{**asdict(result), "accuracy": result.accuracy} for result in results]))


if __name__ == "__main__":
    main()
