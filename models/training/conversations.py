"""Training conversations: notes followed by many questions, in layouts and wordings that people use."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from string import ascii_lowercase

from quire.models.notes import (
    ATTRIBUTES,
    ITEMS,
    QUESTIONS,
    Message,
    Note,
    answer,
    answer_unknown,
    question,
    sample_notes,
    text,
)

PLAIN = 0.4
"""Share of conversations in the simplest form: the first question follows the notes, all are worded alike."""
UNKNOWN = 0.08
"""Share of questions, in the other conversations, about an item without a note."""

NOTED = "noted."
"""The model's answer to notes without a question."""

SMALL_TALK = {
    **dict.fromkeys(
        ("hello", "hello!", "Hello", "Hello!", "hi", "Hi"), "hello! give me some notes and ask about them."
    ),
    **dict.fromkeys(("thanks", "Thanks!", "thank you", "Thank you."), "you are welcome."),
    **dict.fromkeys(("what do you know?", "What do you know?"), "i know the notes."),
}
"""Canned answers to messages that are not about notes."""

FILLERS = (
    "good morning.",
    "Good morning!",
    "here are some notes.",
    "Here are my notes:",
    "please read these notes.",
    "remember these facts.",
    "you are a helpful assistant.",
    "You are a helpful assistant.",
    "answer the questions about the notes.",
    "the notes are in no order.",
    "this is a list of things and numbers.",
    "some of this is new, and some of it is old.",
)
"""Sentences before and after the notes that contain no note."""

SEPARATORS = (" ", " ", " ", "\n")
"""Separators between two notes; mostly a space."""

NO_VALUE = 0
"""Placeholder for the value of an item without a note."""


def conversation(rng: Random, num_facts: int, num_questions: int) -> list[Message]:
    """Make a conversation about random notes, perhaps with some small talk before or after it."""
    turns = about_notes(rng, num_facts, num_questions)
    if rng.random() >= 0.1 * (1.0 - PLAIN):
        return turns
    said = rng.choice(list(SMALL_TALK))
    talk = [Message("user", said), Message("assistant", SMALL_TALK[said])]
    return [*turns, *talk] if turns[0].role == "system" or rng.random() < 0.5 else [*talk, *turns]


def about_notes(
    rng: Random, num_facts: int, num_questions: int, *, plain: float = PLAIN, unknown: float = UNKNOWN
) -> list[Message]:
    """Make questions about notes; none is repeated before all notes were asked about."""
    notes = sample_notes(rng, num_facts)
    asked = list(_ask_order(rng, notes, num_questions))
    if rng.random() < plain:
        return _turns([f"{text(notes)} {question(asked[0])}", *map(question, asked[1:])], asked)
    strangers = _without_note(rng, notes)
    asked = [rng.choice(strangers) if strangers and rng.random() < unknown else note for note in asked]
    wordings = QUESTIONS if rng.random() < 0.5 else QUESTIONS[:1]
    questions = [question(note, rng.choice(wordings)) for note in asked]
    body = _decorate(rng, text(notes, rng.choice(SEPARATORS)))
    layout = rng.randrange(4)
    if layout == 0:
        return [Message("system", body), *_turns(questions, asked)]
    if layout == 1:
        return [Message("user", body), Message("assistant", NOTED), *_turns(questions, asked)]
    if layout == 2:
        return _in_two_parts(rng, notes, num_questions)
    return _turns([f"{body} {questions[0]}", *questions[1:]], asked)


def recital(rng: Random, num_facts: int, num_statements: int, *, terse: bool) -> list[tuple[str, bool]]:
    """Make a text without turns that states a few notes repeatedly.

    Such a text teaches the model to look an item up, with a fifth of the tokens that questions take.

    Args:
        terse: whether to shorten the notes to ``lantern is 417.``

    Returns:
        The statements in order, each with whether it repeats an earlier one.
    """
    notes = sample_notes(rng, num_facts)
    seen: set[str] = set()
    statements = []
    for _ in range(num_statements):
        note = rng.choice(notes)
        statements.append((f"{note.item} is {note.value}." if terse else str(note), note.item in seen))
        seen.add(note.item)
    return statements


def _ask_order(rng: Random, notes: list[Note], count: int) -> Iterator[Note]:
    """Choose notes to ask about, in rounds over all notes, each round in a new random order."""
    while count > 0:
        chosen = rng.sample(notes, min(count, len(notes)))
        yield from chosen
        count -= len(chosen)


def _turns(users: list[str], asked: list[Note]) -> list[Message]:
    """Combine the user's messages with the answers into turns."""
    pairs = zip(users, asked, strict=True)
    return [
        turn for user, note in pairs for turn in (Message("user", user), Message("assistant", _reply(note)))
    ]


def _without_note(rng: Random, notes: list[Note]) -> list[Note]:
    """Make a few notes without a value, about items that the given notes do not mention."""
    known = {note.item for note in notes}
    items = [item for item in ITEMS if item not in known]
    return [Note(rng.choice(ATTRIBUTES), item, NO_VALUE) for item in rng.sample(items, min(4, len(items)))]


def _reply(note: Note) -> str:
    return answer_unknown(note.attribute, note.item) if note.value == NO_VALUE else answer(note)


def _decorate(rng: Random, body: str) -> str:
    """Add fillers before or after the notes, or begin with a capital letter, as people do."""
    if rng.random() < 0.3:
        body = body[0].upper() + body[1:]
    if rng.random() < 0.5:
        body = f"{_filler(rng)}{rng.choice(SEPARATORS)}{body}"
    if rng.random() < 0.2:
        body = f"{body} {_filler(rng)}"
    return body


def _filler(rng: Random) -> str:
    """Choose a sentence that is not a note; sometimes it consists of made-up words."""
    if rng.random() < 0.7:
        return rng.choice(FILLERS)
    words = ("".join(rng.choices(ascii_lowercase, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 8)))
    return f"{' '.join(words)}."


def _in_two_parts(rng: Random, notes: list[Note], num_questions: int) -> list[Message]:
    """Give a part of the notes, ask about it, give the rest, and ask about all."""
    cut = rng.randint(1, max(1, len(notes) - 1))
    asked_first = list(_ask_order(rng, notes[:cut], max(1, num_questions // 3)))
    asked_then = list(_ask_order(rng, notes, num_questions - len(asked_first)))
    first = list(map(question, asked_first))
    then = list(map(question, asked_then))
    first[0] = f"{text(notes[:cut])} {first[0]}"
    if not then or not notes[cut:]:
        return _turns([*first, *then], [*asked_first, *asked_then])
    rest = text(notes[cut:])
    if rng.random() < 0.5:
        then[0] = f"{rest} {then[0]}"
        return _turns([*first, *then], [*asked_first, *asked_then])
    noted = [Message("user", rest), Message("assistant", NOTED)]
    return [*_turns(first, asked_first), *noted, *_turns(then, asked_then)]
