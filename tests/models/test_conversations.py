"""Conversations to train on: who speaks when, and that every answer follows from the notes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from quire.models.notes import ITEMS, Message
from quire.models.training.conversations import NOTED, SMALL_TALK, about_notes, conversation, recital

SEEDS = range(50)


def answers_in(turns: list[Message]) -> list[str]:
    return [turn.content for turn in turns if turn.role == "assistant" and turn.content != NOTED]


@pytest.mark.parametrize("plain", [0.0, 1.0])
@pytest.mark.parametrize("num_facts", [1, 2, 20])
def test_every_answer_stands_in_the_notes_before_it(plain: float, num_facts: int) -> None:
    for seed in SEEDS:
        said = ""
        for turn in about_notes(Random(seed), num_facts, 6, plain=plain, unknown=0.0):
            if turn.role == "assistant" and turn.content != NOTED:
                assert turn.content.removeprefix("the ") in said
            said += turn.content


@pytest.mark.parametrize("plain", [0.0, 1.0])
@pytest.mark.parametrize("num_questions", [1, 2, 7, 30])
def test_every_question_is_answered(plain: float, num_questions: int) -> None:
    for seed in SEEDS:
        turns = about_notes(Random(seed), 10, num_questions, plain=plain)
        assert len(answers_in(turns)) == num_questions
        roles = [turn.role for turn in turns[turns[0].role == "system" :]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_no_note_is_asked_about_twice_before_all_have_been() -> None:
    counts = Counter(answers_in(about_notes(Random(1), 10, 25, plain=1.0)))
    assert sorted(counts.values()) == [2] * 5 + [3] * 5


def test_unknown_items_have_no_note() -> None:
    unknown = 0
    for seed in SEEDS:
        turns = about_notes(Random(seed), 20, 6, plain=0.0, unknown=1.0)
        for reply in answers_in(turns):
            if reply.endswith(" is not in the notes."):
                unknown += 1
                item = reply.split()[4]
                assert not any(f"the {item} is {digit}" in turns[0].content for digit in range(1, 10))
    assert unknown >= 6 * len(SEEDS) // 2


def test_notes_about_every_item_leave_nothing_unknown() -> None:
    for seed in SEEDS:
        turns = about_notes(Random(seed), len(ITEMS), 6, plain=0.0, unknown=1.0)
        assert not any("not in the notes" in turn.content for turn in turns)


def test_small_talk_is_canned() -> None:
    said = [pair for seed in range(200) for pair in pairwise(conversation(Random(seed), 3, 2))]
    canned = [(user, reply) for user, reply in said if user.content in SMALL_TALK]
    assert canned
    assert all(SMALL_TALK[user.content] == reply.content for user, reply in canned)


@pytest.mark.parametrize("terse", [True, False])
def test_recital_marks_what_it_repeats(terse: bool) -> None:
    statements = recital(Random(1), 4, 32, terse=terse)
    first_times = [statement for statement, repeated in statements if not repeated]
    assert len(first_times) == len(set(first_times)) == 4
    assert {statement for statement, _ in statements} == set(first_times)


def test_the_seed_decides() -> None:
    assert about_notes(Random(1), 20, 6) == about_notes(Random(1), 20, 6)
    assert about_notes(Random(1), 20, 6) != about_notes(Random(2), 20, 6)
