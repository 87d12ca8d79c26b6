"""The demo model's language: notes, questions and answers."""

from __future__ import annotations

import sys
from random import Random

import pytest

from quire.models.notes import (
    ITEMS,
    QUESTIONS,
    VALUES,
    Note,
    answer,
    answer_unknown,
    held_out,
    prompt,
    question,
    sample_notes,
    text,
)
from tests.testing.commands import run_command

LANTERN = Note("code", "lantern", 417)
ANCHOR = Note("room", "anchor", 902)


def held_out_texts(seed: int) -> list[str]:
    return [example.messages[0]["content"] for example in held_out(20, 5, seed)]


def test_wording() -> None:
    assert question(LANTERN) == "what is the code of the lantern?"
    assert answer(LANTERN) == "the code of the lantern is 417."
    assert answer_unknown("code", "lantern") == "the code of the lantern is not in the notes."
    assert text([LANTERN, ANCHOR]) == "the code of the lantern is 417. the room of the anchor is 902."
    assert prompt([LANTERN, ANCHOR], ANCHOR) == f"{text([LANTERN, ANCHOR])} what is the room of the anchor?"


@pytest.mark.parametrize("wording", QUESTIONS)
def test_every_wording_names_what_it_asks_for(wording: str) -> None:
    assert "code of the lantern" in question(LANTERN, wording)
    assert "{" not in question(LANTERN, wording)


@pytest.mark.parametrize("num_facts", [1, 20, 125, len(ITEMS)])
def test_every_item_has_one_note(num_facts: int) -> None:
    notes = sample_notes(Random(num_facts), num_facts)
    assert len({note.item for note in notes}) == num_facts
    assert all(note.value in VALUES for note in notes)


def test_items_are_different_words() -> None:
    assert len(set(ITEMS)) == len(ITEMS)


def test_held_out_repeats_itself_and_changes_with_the_seed() -> None:
    assert held_out(3, 5) == held_out(3, 5)
    assert held_out(3, 5)[:2] == held_out(2, 5)
    assert not set(held_out_texts(0)) & set(held_out_texts(1))


@pytest.mark.parametrize("num_turns", [1, 4])
def test_held_out_questions_are_answered_by_their_notes(num_turns: int) -> None:
    for messages, expected in held_out(10, 20, num_turns=num_turns):
        first, last = messages[0], messages[-1]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (num_turns - 1) + ["user"]
        assert expected in first["content"]
        assert expected.split(" is ")[0] in last["content"]
        assert all(message["content"] in first["content"] for message in messages[1::2])


def test_needs_no_torch() -> None:
    code = "import sys, quire.models.notes; assert not {'torch', 'tokenizers'} & set(sys.modules)"
    run_command(sys.executable, "-c", code)
