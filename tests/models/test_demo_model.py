"""The bundled checkpoint: its tokenizer, its chat template, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from quire.models.notes import (
    ATTRIBUTES,
    HELD_OUT_SEEDS,
    ITEMS,
    QUESTIONS,
    VALUES,
    Example,
    Note,
    answer,
    answer_unknown,
    held_out,
    prompt,
    question,
    sample_notes,
    text,
)
from quire.models.source import demo_model_path
from quire.models.training.conversations import NOTED
from quire.models.training.tokenizer import SPECIAL_TOKENS, make_tokenizer, save_tokenizer
from tests.testing.tiny_models import best_tokens

CONVERSATIONS = [
    [{"role": "user", "content": " the code of the lantern is 417. what is the code of the lantern? \n"}],
    [
        {"role": "system", "content": "the code of the lantern is 417."},
        {"role": "user", "content": "what is the code of the lantern?"},
        {"role": "assistant", "content": "the code of the lantern is 417."},
        {"role": "user", "content": "Ünïcode 🏮"},
    ],
]


# --- held-out examples of each form of notes and questions that the demo model is taught --------------------

Form = Callable[[Random, Sequence[Note]], Example]
"""Makes a conversation about the notes that ends with a question about one of them."""


def held_out_form(form: Form, num: int, num_facts: int, seed: int = 0) -> list[Example]:
    """Make examples of one form that training never sees; all forms get the same notes."""
    examples = []
    for index in range(num):
        rng = Random(2 * HELD_OUT_SEEDS + (seed << 20) + index)
        examples.append(form(rng, sample_notes(rng, num_facts)))
    return examples


def _user(*contents: str) -> list[dict[str, str]]:
    """Make a conversation in which the user and the model alternate, beginning with the user."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def _worded(wording: str) -> Form:
    """Return the form that asks in the given words."""

    def form(rng: Random, notes: Sequence[Note]) -> Example:
        note = rng.choice(notes)
        return Example(_user(f"{text(notes)} {question(note, wording)}"), answer(note))

    return form


def _lines(rng: Random, notes: Sequence[Note]) -> Example:
    """Put each note on its own line."""
    note = rng.choice(notes)
    return Example(_user("\n".join([text(notes, "\n"), question(note)])), answer(note))


def _system(rng: Random, notes: Sequence[Note]) -> Example:
    """Give the notes in the system message."""
    note = rng.choice(notes)
    return Example([{"role": "system", "content": text(notes)}, *_user(question(note))], answer(note))


def _instructed(rng: Random, notes: Sequence[Note]) -> Example:
    """Begin with a system message that says nothing about the notes."""
    note = rng.choice(notes)
    system = {"role": "system", "content": "you are a helpful assistant."}
    return Example([system, *_user(prompt(notes, note))], answer(note))


def _notes_alone(rng: Random, notes: Sequence[Note]) -> Example:
    """Give the notes without a question."""
    return Example(_user(text(notes)), NOTED)


def _asked_later(rng: Random, notes: Sequence[Note]) -> Example:
    """Ask in a second message, after the model has acknowledged the notes."""
    note = rng.choice(notes)
    return Example(_user(text(notes), NOTED, question(note)), answer(note))


def _two_parts(rng: Random, notes: Sequence[Note]) -> Example:
    """Give the second half of the notes after a question, then ask about the first half again."""
    half = len(notes) // 2
    first, note = rng.choice(notes[:half]), rng.choice(notes[:half])
    turns = _user(prompt(notes[:half], first), answer(first), f"{text(notes[half:])} {question(note)}")
    return Example(turns, answer(note))


def _no_note(rng: Random, notes: Sequence[Note]) -> Example:
    """Ask about an item without a note."""
    known = {note.item for note in notes}
    item = rng.choice([item for item in ITEMS if item not in known])
    attribute = rng.choice(notes).attribute
    asked = QUESTIONS[0].format(attribute=attribute, item=item)
    return Example(_user(f"{text(notes)} {asked}"), answer_unknown(attribute, item))


FORMS: dict[str, Form] = {
    **{wording.format(attribute="code", item="lantern"): _worded(wording) for wording in QUESTIONS},
    "notes line by line": _lines,
    "notes as the system message": _system,
    "another system message": _instructed,
    "notes alone": _notes_alone,
    "question after the notes were noted": _asked_later,
    "notes in two messages": _two_parts,
    "an item without a note": _no_note,
}
"""All forms by name."""


# --- tests --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), padding_side="left")
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval(), tokenizer


def num_right(
    checkpoint: tuple[PreTrainedModel, PreTrainedTokenizerFast], examples: Sequence[Example]
) -> int:
    """Return how many examples transformers answers exactly right, greedily, and ends the answer."""
    model, tokenizer = checkpoint
    answers = []
    for messages, expected in examples:
        answered = [*messages, {"role": "assistant", "content": expected}]
        prompt, whole = (
            tokenizer.apply_chat_template(each, add_generation_prompt=each is messages, return_dict=True)
            for each in (messages, answered)
        )
        answers.append((prompt["input_ids"], whole["input_ids"][len(prompt["input_ids"]) :]))
    return sum(best_tokens(model, *each) == each[1] for each in answers)


def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((demo_model_path() / "config.json").read_text())
    return loaded


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_words_of_the_language_are_one_token(tokenizer: Tokenizer) -> None:
    words = [f" {word}" for word in (*ITEMS, *ATTRIBUTES, *VALUES, "the", "of", "is")]
    assert [word for word in words if len(tokenizer.encode(word).ids) != 1] == []


def test_tokenizer_can_be_made_again(tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer(), tmp_path)
    for made in tmp_path.iterdir():
        assert json.loads(made.read_text()) == json.loads((demo_model_path() / made.name).read_text())


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_plain_jinja_renders_as_transformers_does(
    messages: list[dict[str, str]], tokenizer: Tokenizer
) -> None:
    settings = json.loads((demo_model_path() / "tokenizer_config.json").read_text())
    template = ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
    rendered = template.render(messages=messages, bos_token=settings["bos_token"], add_generation_prompt=True)
    reference = AutoTokenizer.from_pretrained(demo_model_path())
    assert rendered == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert tokenizer.encode(rendered, add_special_tokens=False).ids == expected


def test_template_refuses_an_unknown_role() -> None:
    with pytest.raises(TemplateError, match="unknown role: critic"):
        AutoTokenizer.from_pretrained(demo_model_path()).apply_chat_template(
            [{"role": "critic", "content": ""}]
        )


def test_ids_agree_between_the_files(tokenizer: Tokenizer) -> None:
    generation = json.loads((demo_model_path() / "generation_config.json").read_text())
    assert config()["vocab_size"] == tokenizer.get_vocab_size()
    assert generation["eos_token_id"] == config()["eos_token_id"] == tokenizer.token_to_id("<|end|>")
    assert [tokenizer.id_to_token(index) for index in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)


def test_heads_share_keys_and_the_file_is_small() -> None:
    assert config()["num_key_value_heads"] < config()["num_attention_heads"]
    assert (demo_model_path() / "model.safetensors").stat().st_size < 6_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "facts", "turns", "right"), [(40, 20, 1, 39), (20, 20, 4, 19), (20, 125, 1, 18)]
)
def test_answers_held_out_notes(
    num: int, facts: int, turns: int, right: int, checkpoint: tuple[PreTrainedModel, PreTrainedTokenizerFast]
) -> None:
    assert num_right(checkpoint, held_out(num, facts, seed=7, num_turns=turns)) >= right


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_answers_every_form(form: str, checkpoint: tuple[PreTrainedModel, PreTrainedTokenizerFast]) -> None:
    assert num_right(checkpoint, held_out_form(FORMS[form], 10, 20, seed=7)) >= 9


@pytest.mark.parametrize("name", FORMS)
def test_the_answer_of_a_form_follows_from_the_messages(name: str) -> None:
    for messages, expected in held_out_form(FORMS[name], 20, 20):
        said = " ".join(message["content"] for message in messages)
        assert messages[-1]["role"] == "user"
        if expected.endswith(" is not in the notes."):
            asked = expected.removesuffix("not in the notes.")
            assert asked not in said
            assert asked.removesuffix(" is ") in messages[-1]["content"]
        elif expected != NOTED:
            assert expected in said
            assert expected.split(" is ")[0].removeprefix("the ") in messages[-1]["content"]


def test_checkpoint_is_bfloat16() -> None:
    header = Path(demo_model_path() / "model.safetensors").read_bytes()[:20000].decode("latin-1")
    assert '"dtype":"BF16"' in header
    assert '"dtype":"F32"' not in header


def test_template_shows_tools_calls_and_their_results() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    text = AutoTokenizer.from_pretrained(demo_model_path()).apply_chat_template(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "417"},
        ],
        tools=[tool],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|bos|><|system|>call a tool by <tool_call>{name, arguments}</tool_call>: "
        '[{"type": "function", "function": {"name": "look"}}]<|end|><|user|>hello<|end|><|assistant|>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|end|>'
        "<|user|>417<|end|><|assistant|>"
    )
