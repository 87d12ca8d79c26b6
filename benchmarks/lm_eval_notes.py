"""Score the demo model with lm-eval over HTTP, and compare with transformers on the same examples.

    quire serve --dtype float32 &
    python -m quire.benchmarks.lm_eval_notes --url http://127.0.0.1:8502

Two tasks are written for lm-eval (``pip install "lm-eval[api]"``, in any environment): one generates the
answer to a question about notes, the other chooses the right value among four by the logprobs of the echoed
prompt. transformers answers both without any server. A server that serves right scores the same to the last
example; the exit status says whether it does. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.models.bundled import demo_model_path
from quire.models.notes import VALUES, held_out

MAX_TOKENS = 24
NUM_CHOICES = 4
TASKS = {"notes_generate": "exact_match", "notes_choose": "acc"}
"""The tasks, and what counts in each."""

_COMMON = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{prompt}}}}"
target_delimiter: ""
"""
_GENERATE = """
output_type: generate_until
doc_to_target: "{{expected}}"
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
_CHOOSE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: right
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


class Question(NamedTuple):
    """An example as both sides see it: text, rendered by the chat template."""

    prompt: str
    expected: str
    choices: list[str]
    """Answers that differ in their value; the right one is at ``right``."""
    right: int


def make_questions(tokenizer: Any, num_examples: int, num_facts: int) -> list[Question]:
    """Return held-out questions."""
    rng = Random(num_examples)
    questions = []
    for example in held_out(num_examples, num_facts):
        prompt = tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, tokenize=False)
        right = rng.randrange(NUM_CHOICES)
        value = example.expected.rstrip(".").split()[-1]
        others = rng.sample([number for number in VALUES if str(number) != value], NUM_CHOICES)
        choices = [example.expected.replace(value, str(other)) for other in others]
        choices[right] = example.expected
        questions.append(Question(prompt, example.expected, choices, right))
    return questions


def offline_scores(tokenizer: Any, questions: Sequence[Question]) -> dict[str, float]:
    """Return the scores of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()

    def ids(text: str) -> torch.Tensor:
        return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])

    def said(question: Question) -> str:
        prompt = ids(question.prompt)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
        return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))

    def choice(question: Question) -> int:
        # Choices are of one length: they differ in the value, which is one token.
        whole = torch.cat([ids(question.prompt + each) for each in question.choices])
        start = ids(question.prompt).shape[1]
        logits = model(whole, logits_to_keep=whole.shape[1] - start + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, whole[:, start:, None])
        return int(logprobs.sum((1, 2)).argmax())

    with torch.inference_mode():
        generated = [said(question) == question.expected for question in questions]
        chosen = [choice(question) for question in questions]
    right = [number == question.right for number, question in zip(chosen, questions, strict=True)]
    return {
        "notes_generate": sum(generated) / len(questions),
        "notes_choose": sum(right) / len(questions),
    }


def served_scores(command: str, url: str, model: str, questions: Sequence[Question]) -> dict[str, float]:
    """Return the scores that lm-eval gives the server."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "questions.jsonl")
        data.write_text("".join(json.dumps(question._asdict()) + "\n" for question in questions))
        for task, rest in (("notes_generate", _GENERATE), ("notes_choose", _CHOOSE)):
            Path(folder, f"{task}.yaml").write_text(_COMMON.format(task=task, data=data) + rest)
        results = Path(folder, "results.json")
        arguments = {
            "--model": "local-completions",
            "--model_args": f"base_url={url}/v1/completions,model={model},num_concurrent=8,max_length=4096",
            "--tasks": ",".join(TASKS),
            "--include_path": folder,
            "--output_path": str(results),
            "--batch_size": "4",
        }
        subprocess.run([command, "run", *(part for pair in arguments.items() for part in pair)], check=True)
        (written,) = Path(folder).glob("results*.json")
        found = json.loads(written.read_text())["results"]
    return {task: found[task][f"{metric},none"] for task, metric in TASKS.items()}


def main() -> None:
    """Score both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8502")
    parser.add_argument("--model", default="demo", help="name that the server gives the demo model")
    parser.add_argument("--lm-eval", default="lm-eval", help="the command")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--facts", type=int, default=100, help="notes in each prompt")
    options = parser.parse_args()
    # Threads that spin beside the server's would slow both down many times over.
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    questions = make_questions(tokenizer, options.examples, options.facts)
    served = served_scores(options.lm_eval, options.url, options.model, questions)
    offline = offline_scores(tokenizer, questions)
    print(f"{'task':<16} {'served':>8} {'offline':>8}")
    for task in TASKS:
        print(f"{task:<16} {served[task]:>8.4f} {offline[task]:>8.4f}")
    print(json.dumps({"examples": len(questions), "served": served, "offline": offline}))
    raise SystemExit(served != offline)


if __name__ == "__main__":
    main()
