"""The demo model's language: notes, questions, answers and the conversations to train on."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from quire.models.conversations import NOTED, SMALL_TALK, conversation, recital
from quire.models.notes import ITEMS, VALUES, Note, answer, held_out, prompt, question, sample_notes, text

LANTERN = Note("code", "lantern", 417)
ANCHOR = Note("room", "anchor", 902)


def test_wording() -> None:
    assert question(LANTERN) == "what is the code of the lantern?"
    assert answer(LANTERN) == "the code of the lantern is 417."
    assert text([LANTERN, ANCHOR]) == "the code of the lantern is 417. the room of the anchor is 902."
    assert prompt([LANTERN, ANCHOR], ANCHOR) == f"{text([LANTERN, ANCHOR])} what is the room of the anchor?"


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
    assert held_out(3, 5) != held_out(3, 5, seed=1)


@pytest.mark.parametrize("num_turns", [1, 4])
def test_held_out_asks_for_what_the_notes_say(num_turns: int) -> None:
    for messages, expected in held_out(10, 20, num_turns=num_turns):
        first, last = messages[0], messages[-1]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (num_turns - 1) + ["user"]
        assert expected in first["content"]
        assert expected.split(" is ")[0] in last["content"]
        assert all(message["content"] in first["content"] for message in messages[1::2])


@pytest.mark.parametrize("plain", [0.0, 1.0])
@pytest.mark.parametrize("num_facts", [1, 2, 20])
def test_answers_of_a_conversation_stand_in_its_notes(plain: float, num_facts: int) -> None:
    for seed in range(50):
        turns = conversation(Random(seed), num_facts, 6, plain=plain)
        said = ""
        for turn in turns:
            if turn.role == "assistant" and turn.content != NOTED:
                assert turn.content.removeprefix("the ") in said
            said += turn.content
        assert turns[-1].role == "assistant"
        assert turns[-1].content not in SMALL_TALK.values()


@pytest.mark.parametrize("terse", [True, False])
def test_recital_marks_what_it_repeats(terse: bool) -> None:
    statements = recital(Random(1), 4, 32, terse=terse)
    first_times = [statement for statement, repeated in statements if not repeated]
    assert len(first_times) == len(set(first_times)) == 4
    assert {statement for statement, _ in statements} == set(first_times)


def test_needs_no_torch() -> None:
    code = "import sys, quire.models.notes; assert not {'torch', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
